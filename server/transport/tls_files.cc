#include "server/transport/tls_files.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/base/log.h"

namespace logprobd {
namespace {

constexpr int64_t kFileBytesMax = int64_t{4} << 20;

using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;

/// A file that a flag names, and its content.
struct NamedFile {
  absl::string_view flag;
  std::string path;
  std::string content;
};

absl::Status Wrong(const NamedFile& file, absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(file.flag, ": ", file.path, " ", what));
}

absl::StatusOr<NamedFile> ReadNamedFile(absl::string_view flag, const std::string& path) {
  NamedFile file{flag, path, ""};
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    return Wrong(file, absl::StrCat("cannot be read: ", std::generic_category().message(errno)));
  }
  if (!S_ISREG(info.st_mode) || info.st_size > kFileBytesMax) {
    return Wrong(file, "is not a regular file of at most 4 MiB");
  }
  std::ifstream stream(path, std::ios::binary);
  if (!stream) {
    return Wrong(file, absl::StrCat("cannot be read: ", std::generic_category().message(errno)));
  }
  file.content.assign(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  return file;
}

Bio BioOf(const NamedFile& file) {
  return {BIO_new_mem_buf(file.content.data(), static_cast<int>(file.content.size())), BIO_free};
}

absl::StatusOr<std::vector<Certificate>> ParseCertificates(const NamedFile& file) {
  const Bio bio = BioOf(file);
  std::vector<Certificate> certificates;
  ERR_clear_error();
  while (X509* const next = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) {
    certificates.emplace_back(next, X509_free);
  }
  const bool is_at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (certificates.empty()) {
    return Wrong(file, "contains no PEM certificate (-----BEGIN CERTIFICATE-----)");
  }
  if (!is_at_end) {
    return Wrong(file, absl::StrCat("is damaged after certificate ", certificates.size()));
  }
  return certificates;
}

/// Refuses a passphrase: a server that starts unattended has none, and OpenSSL would otherwise ask
/// for it on the terminal.
int NoPassphrase(char* /*buffer*/, int /*size*/, int /*writes*/, void* /*context*/) { return -1; }

absl::StatusOr<Key> ParseKey(const NamedFile& file) {
  const Bio bio = BioOf(file);
  Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassphrase, nullptr), EVP_PKEY_free);
  ERR_clear_error();
  if (key == nullptr) {
    return Wrong(file, "contains no PEM private key without a passphrase");
  }
  return key;
}

std::string NameOf(X509_NAME* name) {
  std::unique_ptr<char, decltype(&std::free)> text(X509_NAME_oneline(name, nullptr, 0), std::free);
  return text == nullptr ? "" : std::string(text.get());
}

absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) {
    return absl::InfinitePast();
  }
  return absl::FromTM(parts, absl::UTCTimeZone());
}

/// Checks that each certificate is valid now and issued by the next one. Returns the time at which
/// the first of them expires.
absl::StatusOr<absl::Time> CheckChain(const NamedFile& file,
                                      const std::vector<Certificate>& certificates,
                                      absl::Time now) {
  absl::Time expiry = absl::InfiniteFuture();
  for (size_t i = 0; i < certificates.size(); ++i) {
    X509* const certificate = certificates[i].get();
    const std::string name = NameOf(X509_get_subject_name(certificate));
    const absl::Time begin = TimeOf(X509_get0_notBefore(certificate));
    const absl::Time end = TimeOf(X509_get0_notAfter(certificate));
    if (now < begin) {
      return Wrong(file, absl::StrCat("has a certificate (", name, ") that is valid only from ",
                                      absl::FormatTime(begin, absl::UTCTimeZone())));
    }
    if (now >= end) {
      return Wrong(file, absl::StrCat("has a certificate (", name, ") that expired at ",
                                      absl::FormatTime(end, absl::UTCTimeZone())));
    }
    if (i + 1 < certificates.size() &&
        X509_check_issued(certificates[i + 1].get(), certificate) != X509_V_OK) {
      return Wrong(file, absl::StrCat("is not a chain: ", name,
                                      " is not issued by the certificate that follows it, ",
                                      NameOf(X509_get_subject_name(certificates[i + 1].get()))));
    }
    expiry = std::min(expiry, end);
  }
  return expiry;
}

absl::Status WriteCopy(const std::string& path, absl::string_view content, int generation) {
  std::ofstream stream(path, std::ios::binary);
  stream << content;
  stream.close();
  // gRPC compares times in whole seconds before and after it reads a key and its certificate, so
  // each generation needs a time of its own.
  const timespec times[2] = {{generation, 0}, {generation, 0}};
  if (!stream || chmod(path.c_str(), S_IRUSR | S_IWUSR) != 0 ||
      utimensat(AT_FDCWD, path.c_str(), times, 0) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot write ", path, ": ", std::generic_category().message(errno)));
  }
  return absl::OkStatus();
}

/// Appends what changes about a file when it is replaced or written.
void AppendStamp(const std::string& path, std::string& stamp) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    absl::StrAppend(&stamp, "errno ", errno, ";");
    return;
  }
  absl::StrAppend(&stamp, info.st_dev, " ", info.st_ino, " ", info.st_size, " ",
                  info.st_mtim.tv_sec, ".", info.st_mtim.tv_nsec, " ", info.st_ctim.tv_sec, ".",
                  info.st_ctim.tv_nsec, ";");
}

}  // namespace

absl::Status TlsFiles::CheckPaths(const Options& options) {
  const auto missing = [](absl::string_view given, absl::string_view needed) {
    return absl::InvalidArgumentError(absl::StrCat(given, " needs ", needed, ", too"));
  };
  if (!options.cert.empty() && options.key.empty()) {
    return missing("--tls-cert", "--tls-key");
  }
  if (!options.key.empty() && options.cert.empty()) {
    return missing("--tls-key", "--tls-cert");
  }
  if (!options.client_ca.empty() && options.cert.empty()) {
    return missing("--tls-client-ca", "--tls-cert and --tls-key");
  }
  if (!options.crl_dir.empty() && options.client_ca.empty()) {
    return missing("--tls-crl-dir", "--tls-client-ca");
  }
  return absl::OkStatus();
}

TlsFiles::TlsFiles(Options options, Metrics& metrics, const Clock& clock,
                   std::function<absl::Time()> wall_now, std::string folder)
    : options_(std::move(options)),
      metrics_(metrics),
      clock_(clock),
      wall_now_(std::move(wall_now)),
      folder_(std::move(folder)),
      next_look_(clock.Now() + kLookInterval) {}

absl::StatusOr<std::unique_ptr<TlsFiles>> TlsFiles::Create(const Options& options, Metrics& metrics,
                                                           const Clock& clock,
                                                           std::function<absl::Time()> wall_now) {
  LOGPROBD_RETURN_IF_ERROR(CheckPaths(options));
  std::error_code error;
  std::string folder =
      (std::filesystem::temp_directory_path(error) / "logprobd-tls-XXXXXX").string();
  if (error || mkdtemp(folder.data()) == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("--tls-cert: cannot make the folder ", folder,
                                                      ": ",
                                                      std::generic_category().message(errno)));
  }
  std::unique_ptr<TlsFiles> files(
      new TlsFiles(options, metrics, clock, std::move(wall_now), std::move(folder)));
  LOGPROBD_RETURN_IF_ERROR(files->Install());
  return files;
}

TlsFiles::~TlsFiles() {
  std::error_code error;
  std::filesystem::remove_all(folder_, error);
  if (error) {
    LogWarning("cannot remove the copies of the TLS files",
               {{"folder", folder_}, {"reason", error.message()}});
  }
}

/// Checks the files and makes their copies current.
absl::Status TlsFiles::Install() {
  tried_stamp_ = seen_stamp_ = Stamp();
  LOGPROBD_ASSIGN_OR_RETURN(const NamedFile cert, ReadNamedFile("--tls-cert", options_.cert));
  LOGPROBD_ASSIGN_OR_RETURN(const NamedFile key, ReadNamedFile("--tls-key", options_.key));
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<Certificate> chain, ParseCertificates(cert));
  LOGPROBD_ASSIGN_OR_RETURN(const Key private_key, ParseKey(key));
  const bool fits = X509_check_private_key(chain.front().get(), private_key.get()) == 1;
  ERR_clear_error();
  if (!fits) {
    return Wrong(key, absl::StrCat("is not the key of the certificate in ", options_.cert));
  }
  LOGPROBD_ASSIGN_OR_RETURN(const absl::Time expiry, CheckChain(cert, chain, wall_now_()));
  NamedFile client_ca;
  if (options_.needs_client_certificates()) {
    LOGPROBD_ASSIGN_OR_RETURN(client_ca, ReadNamedFile("--tls-client-ca", options_.client_ca));
    LOGPROBD_RETURN_IF_ERROR(ParseCertificates(client_ca).status());
  }
  if (!options_.crl_dir.empty() && access(options_.crl_dir.c_str(), R_OK | X_OK) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("--tls-crl-dir: ", options_.crl_dir,
                     " cannot be read: ", std::generic_category().message(errno)));
  }

  const int generation = generation_ + 1;
  const std::string name = absl::StrCat("generation-", generation);
  const std::string folder = absl::StrCat(folder_, "/", name);
  std::error_code error;
  std::filesystem::remove_all(folder, error);  // a previous attempt may have failed to write
  std::filesystem::create_directory(folder, error);
  LOGPROBD_RETURN_IF_ERROR(WriteCopy(folder + "/cert.pem", cert.content, generation));
  LOGPROBD_RETURN_IF_ERROR(WriteCopy(folder + "/key.pem", key.content, generation));
  // gRPC reads revocation lists again only when another file changes. The comment is such a change.
  LOGPROBD_RETURN_IF_ERROR(WriteCopy(
      folder + "/client_ca.pem", absl::StrCat(client_ca.content, "\n# ", name, "\n"), generation));
  const std::string link = folder_ + "/current";
  std::filesystem::create_directory_symlink(name, link + ".new", error);
  if (!error) {
    std::filesystem::rename(link + ".new", link, error);
  }
  if (error) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot write ", link, ": ", error.message()));
  }
  std::filesystem::remove_all(absl::StrCat(folder_, "/generation-", generation_), error);
  generation_ = generation;
  metrics_.SetTlsCertificateExpiry(expiry);
  return absl::OkStatus();
}

void TlsFiles::Reload() {
  const absl::Status status = Install();
  metrics_.RecordTlsReload(status.ok());
  if (status.ok()) {
    LogInfo("TLS certificates read again", {{"file", options_.cert}});
  } else {
    LogError("the TLS certificates stay as they are", {{"reason", status.message()}});
  }
}

void TlsFiles::ReloadIfChanged() {
  const absl::Time now = clock_.Now();
  if (now < next_look_) {
    return;
  }
  next_look_ = now + kLookInterval;
  const std::string stamp = Stamp();
  const bool is_settled = stamp == std::exchange(seen_stamp_, stamp);
  if (is_settled && stamp != tried_stamp_) {
    Reload();
  }
}

/// Returns a text that changes whenever a file does.
std::string TlsFiles::Stamp() const {
  std::string stamp;
  for (const std::string& path :
       {options_.cert, options_.key, options_.client_ca, options_.crl_dir}) {
    if (!path.empty()) {
      AppendStamp(path, stamp);
    }
  }
  return stamp;
}

}  // namespace logprobd
