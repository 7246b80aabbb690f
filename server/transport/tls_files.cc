#include "server/transport/tls_files.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <ctime>
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

/// Returns the error of a file that cannot be opened, by errno.
absl::Status CannotRead(const NamedFile& file) {
  const int error = errno;
  absl::Status status =
      Wrong(file, absl::StrCat("cannot be read: ", std::generic_category().message(error)));
  return error == EMFILE || error == ENFILE || error == ENOMEM
             ? absl::ResourceExhaustedError(status.message())
             : status;
}

absl::StatusOr<NamedFile> ReadNamedFile(absl::string_view flag, const std::string& path) {
  NamedFile file{flag, path, ""};
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return CannotRead(file);
  if (!S_ISREG(info.st_mode) || info.st_size > kFileBytesMax) {
    return Wrong(file, "is not a regular file of at most 4 MiB");
  }
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return CannotRead(file);
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
  if (key == nullptr) return Wrong(file, "contains no PEM private key without a passphrase");
  return key;
}

/// Returns what `write` writes to the BIO that it gets.
template <typename Write>
std::string PemOf(Write write) {
  const Bio bio(BIO_new(BIO_s_mem()), BIO_free);
  write(bio.get());
  char* data = nullptr;
  const int64_t length = BIO_get_mem_data(bio.get(), &data);
  return {data, static_cast<size_t>(length)};
}

/// Returns only what was checked: either file may contain more, such as another key.
TlsFiles::Pair PairOf(const std::vector<Certificate>& chain, const Key& key) {
  return {.cert = PemOf([&](BIO* bio) {
            for (const Certificate& certificate : chain) PEM_write_bio_X509(bio, certificate.get());
          }),
          .key = PemOf([&](BIO* bio) {
            PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
          })};
}

std::string NameOf(X509_NAME* name) {
  std::unique_ptr<char, decltype(&std::free)> text(X509_NAME_oneline(name, nullptr, 0), std::free);
  return text == nullptr ? "" : std::string(text.get());
}

absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
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

absl::Status CannotCopy() {
  return absl::ResourceExhaustedError(absl::StrCat("--tls-cert: cannot copy the TLS files: ",
                                                   std::generic_category().message(errno)));
}

/// Returns a new file in memory.
absl::StatusOr<FileDescriptor> MakeCopy(absl::string_view content, int generation) {
  FileDescriptor copy(memfd_create("logprobd-tls", MFD_CLOEXEC));
  if (!copy.is_open() || fchmod(copy.get(), S_IRUSR | S_IWUSR) != 0) return CannotCopy();
  while (!content.empty()) {
    const ssize_t written = write(copy.get(), content.data(), content.size());
    if (written <= 0) return CannotCopy();
    content.remove_prefix(static_cast<size_t>(written));
  }
  // gRPC compares times in whole seconds before and after it reads a key and its certificate, so
  // each generation needs a time of its own.
  const timespec times[2] = {{generation, 0}, {generation, 0}};
  if (futimens(copy.get(), times) != 0) return CannotCopy();
  return copy;
}

/// Makes the number of `file` stand for `copy`, in one step for all who open its path.
absl::Status Replace(FileDescriptor& file, FileDescriptor copy) {
  if (!file.is_open()) {
    file = std::move(copy);
    return absl::OkStatus();
  }
  return dup3(copy.get(), file.get(), O_CLOEXEC) < 0 ? CannotCopy() : absl::OkStatus();
}

std::string PathOf(const FileDescriptor& file) {
  return absl::StrCat("/proc/self/fd/", file.get());
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
  if (!options.cert.empty() && options.key.empty()) return missing("--tls-cert", "--tls-key");
  if (!options.key.empty() && options.cert.empty()) return missing("--tls-key", "--tls-cert");
  if (!options.client_ca.empty() && options.cert.empty()) {
    return missing("--tls-client-ca", "--tls-cert and --tls-key");
  }
  if (!options.crl_dir.empty() && options.client_ca.empty()) {
    return missing("--tls-crl-dir", "--tls-client-ca");
  }
  return absl::OkStatus();
}

TlsFiles::TlsFiles(Options options, Metrics& metrics, const Clock& clock,
                   std::function<absl::Time()> wall_now)
    : options_(std::move(options)),
      metrics_(metrics),
      clock_(clock),
      wall_now_(std::move(wall_now)),
      next_look_(clock.Now() + kLookInterval) {}

absl::StatusOr<std::unique_ptr<TlsFiles>> TlsFiles::Create(const Options& options, Metrics& metrics,
                                                           const Clock& clock,
                                                           std::function<absl::Time()> wall_now) {
  LOGPROBD_RETURN_IF_ERROR(CheckPaths(options));
  std::unique_ptr<TlsFiles> files(new TlsFiles(options, metrics, clock, std::move(wall_now)));
  LOGPROBD_RETURN_IF_ERROR(files->Install());
  return files;
}

std::string TlsFiles::pair_path() const { return PathOf(pair_file_); }

std::string TlsFiles::client_ca_path() const { return PathOf(client_ca_file_); }

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

  ++generation_;
  Pair pair = PairOf(chain, private_key);
  LOGPROBD_ASSIGN_OR_RETURN(FileDescriptor pair_copy,
                            MakeCopy(absl::StrCat(pair.key, pair.cert), generation_));
  // gRPC reads revocation lists again only when another file changes. The comment is such a change.
  LOGPROBD_ASSIGN_OR_RETURN(
      FileDescriptor client_ca_copy,
      MakeCopy(absl::StrCat(client_ca.content, "\n# generation ", generation_, "\n"), generation_));
  LOGPROBD_RETURN_IF_ERROR(take_(pair));  // Nothing is likely to fail from here on.
  LOGPROBD_RETURN_IF_ERROR(Replace(client_ca_file_, std::move(client_ca_copy)));
  LOGPROBD_RETURN_IF_ERROR(Replace(pair_file_, std::move(pair_copy)));
  pair_ = std::move(pair);
  metrics_.SetTlsCertificateExpiry(expiry);
  return absl::OkStatus();
}

bool TlsFiles::Reload() { return Report(Install()); }

bool TlsFiles::Report(const absl::Status& installed) {
  is_short_ = absl::IsResourceExhausted(installed);
  metrics_.RecordTlsReload(installed.ok());
  if (installed.ok()) {
    LogInfo("TLS certificates read again", {{"file", options_.cert}});
  } else {
    LogError("the TLS certificates stay as they are", {{"reason", installed.message()}});
  }
  return installed.ok();
}

bool TlsFiles::ReloadIfChanged() {
  const absl::Time now = clock_.Now();
  if (now < next_look_) return false;
  next_look_ = now + kLookInterval;
  const std::string stamp = Stamp();
  const bool is_settled = stamp == std::exchange(seen_stamp_, stamp);
  const bool was_tried = stamp == tried_stamp_;
  if (!is_settled || (was_tried && !is_short_)) return false;
  const absl::Status status = Install();
  return !(was_tried && absl::IsResourceExhausted(status)) && Report(status);
}

std::string TlsFiles::Stamp() const {
  std::string stamp;
  for (const std::string& path :
       {options_.cert, options_.key, options_.client_ca, options_.crl_dir}) {
    if (!path.empty()) AppendStamp(path, stamp);
  }
  return stamp;
}

}  // namespace logprobd
