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
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/transport/pem.h"

namespace logprobd {
namespace {

using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

absl::StatusOr<std::vector<Certificate>> CertificatesOf(const NamedFile& file) {
  auto [certificates, is_damaged] = ParseCertificates(file.content);
  if (certificates.empty()) {
    return Wrong(file, "contains no PEM certificate (-----BEGIN CERTIFICATE-----)");
  }
  if (is_damaged) {
    return Wrong(file, absl::StrCat("is damaged after certificate ", certificates.size()));
  }
  return std::move(certificates);
}

absl::StatusOr<Key> ParseKey(const NamedFile& file) {
  const Bio bio = BioOf(file.content);
  Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassphrase, nullptr), EVP_PKEY_free);
  ERR_clear_error();
  if (key == nullptr) return Wrong(file, "contains no PEM private key without a passphrase");
  return key;
}

/// Returns what `write` writes to the BIO that it gets.
template <typename Write>
std::string PemOf(Write write) {
  const Bio bio(BIO_new(BIO_s_mem()));
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

/// A bundle may hold CAs that are no longer used, so one that has expired is no error.
void WarnOfExpired(const std::vector<Certificate>& cas, absl::Time now) {
  for (const Certificate& ca : cas) {
    const absl::Time end = TimeOf(X509_get0_notAfter(ca.get()));
    if (now < end) continue;
    LogWarning("a CA of --tls-client-ca has expired, so its clients are refused",
               {{"ca", NameOf(X509_get_subject_name(ca.get()))},
                {"expired_at", absl::FormatTime(end, absl::UTCTimeZone())}});
  }
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
      next_look_(clock.Now() + kLookInterval) {
  if (!options_.crl_dir.empty()) {
    revocation_ = std::make_shared<RevocationCheck>(metrics_, wall_now_);
  }
}

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
  tried_stamp_ = Stamp();
  is_change_seen_ = false;
  // What is wrong with one of them must not keep a CA trusted that is removed, or a certificate
  // valid that is revoked.
  std::vector<std::string> errors;
  absl::StatusCode code = absl::StatusCode::kOk;
  for (const absl::Status& status : {InstallPair(), InstallClientCa(), InstallLists()}) {
    if (status.ok()) continue;
    errors.emplace_back(status.message());
    // A lack of files or memory may pass, so that a later look tries again.
    if (code != absl::StatusCode::kResourceExhausted) code = status.code();
  }
  return {code, absl::StrJoin(errors, "; ")};
}

absl::Status TlsFiles::InstallPair() {
  LOGPROBD_ASSIGN_OR_RETURN(const NamedFile cert, ReadNamedFile("--tls-cert", options_.cert));
  LOGPROBD_ASSIGN_OR_RETURN(const NamedFile key, ReadNamedFile("--tls-key", options_.key));
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<Certificate> chain, CertificatesOf(cert));
  LOGPROBD_ASSIGN_OR_RETURN(const Key private_key, ParseKey(key));
  const bool fits = X509_check_private_key(chain.front().get(), private_key.get()) == 1;
  ERR_clear_error();
  if (!fits) {
    return Wrong(key, absl::StrCat("is not the key of the certificate in ", options_.cert));
  }
  LOGPROBD_ASSIGN_OR_RETURN(const absl::Time expiry, CheckChain(cert, chain, wall_now_()));
  Pair pair = PairOf(chain, private_key);
  LOGPROBD_ASSIGN_OR_RETURN(FileDescriptor copy,
                            MakeCopy(absl::StrCat(pair.key, pair.cert), ++generation_));
  LOGPROBD_RETURN_IF_ERROR(take_(pair));  // Nothing is likely to fail from here on.
  LOGPROBD_RETURN_IF_ERROR(Replace(pair_file_, std::move(copy)));
  pair_ = std::move(pair);
  metrics_.SetTlsCertificateExpiry(expiry);
  return absl::OkStatus();
}

absl::Status TlsFiles::InstallClientCa() {
  if (!options_.needs_client_certificates()) return absl::OkStatus();
  LOGPROBD_ASSIGN_OR_RETURN(NamedFile file, ReadNamedFile("--tls-client-ca", options_.client_ca));
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<Certificate> cas, CertificatesOf(file));
  WarnOfExpired(cas, wall_now_());
  LOGPROBD_ASSIGN_OR_RETURN(FileDescriptor copy, MakeCopy(file.content, ++generation_));
  LOGPROBD_RETURN_IF_ERROR(Replace(client_ca_file_, std::move(copy)));
  client_ca_ = std::move(file.content);
  return absl::OkStatus();
}

absl::Status TlsFiles::InstallLists() {
  if (revocation_ == nullptr || client_ca_.empty()) return absl::OkStatus();
  const bool is_first = lists_ == nullptr;
  RevocationLists::ReadResult reading =
      RevocationLists::Read(options_.crl_dir, client_ca_, lists_.get());
  if (!is_first || reading.problems.empty()) {
    lists_ = std::move(reading.lists);
    revocation_->Set(lists_);
    metrics_.SetTlsRevocation(lists_->FirstExpiry(), static_cast<int64_t>(reading.problems.size()));
  }
  if (lists_ != nullptr &&
      !reading.is_out_of_resources) {  // It is read again and again while files are short.
    LogInfo("revocation lists read", {{"folder", options_.crl_dir},
                                      {"lists", static_cast<int64_t>(lists_->lists().size())}});
    for (const std::string& ca : lists_->WithoutList()) {
      LogWarning("a CA of clients has no revocation list, so it revokes nothing", {{"ca", ca}});
    }
    expiry_reported_ = absl::InfinitePast();
    ReportExpiredLists();
  }
  if (reading.problems.empty()) return absl::OkStatus();
  const std::string text = absl::StrJoin(reading.problems, "; ");
  return reading.is_out_of_resources ? absl::ResourceExhaustedError(text)
                                     : absl::FailedPreconditionError(text);
}

void TlsFiles::ReportExpiredLists() {
  const absl::Time now = wall_now_();
  for (const RevocationLists::List& list : lists_->lists()) {
    if (list.expires_at > now || list.expires_at <= expiry_reported_) continue;
    LogError("a revocation list has expired, so all clients of its CA are refused",
             {{"file", list.path},
              {"ca", list.issuer},
              {"expired_at", absl::FormatTime(list.expires_at, absl::UTCTimeZone())}});
  }
  expiry_reported_ = now;
}

bool TlsFiles::Reload() { return Report(Install()); }

bool TlsFiles::Report(const absl::Status& installed) {
  is_out_of_resources_ = absl::IsResourceExhausted(installed);
  metrics_.RecordTlsReload(installed.ok());
  if (installed.ok()) {
    LogInfo("TLS certificates read again", {{"file", options_.cert}});
  } else {
    LogError("TLS files stay as they are, because new ones are wrong",
             {{"reason", installed.message()}});
  }
  return installed.ok();
}

bool TlsFiles::ReloadIfChanged() {
  const absl::Time now = clock_.Now();
  if (now < next_look_) return false;
  next_look_ = now + kLookInterval;
  if (lists_ != nullptr) ReportExpiredLists();
  const bool was_tried = Stamp() == tried_stamp_;
  // Files get an interval in which they are completed, but no more: where one of the folder changes
  // all the time, a revocation takes effect nevertheless.
  const bool was_change_seen = std::exchange(is_change_seen_, !was_tried);
  if (was_tried ? !is_out_of_resources_ : !was_change_seen) return false;
  const absl::Status status = Install();
  return !(was_tried && absl::IsResourceExhausted(status)) && Report(status);
}

std::string TlsFiles::Stamp() const {
  std::string stamp;
  for (const std::string& path :
       {options_.cert, options_.key, options_.client_ca, options_.crl_dir}) {
    if (!path.empty()) AppendStamp(path, stamp);
  }
  // The folder's own time does not change when a list is written in place, or its link's target is.
  if (revocation_ != nullptr) {
    const std::vector<std::string> no_files;
    // Reading the lists finds an error again.
    for (const std::string& name : FilesOfListFolder(options_.crl_dir).value_or(no_files)) {
      absl::StrAppend(&stamp, name, " ");
      AppendStamp(absl::StrCat(options_.crl_dir, "/", name), stamp);
    }
  }
  return stamp;
}

}  // namespace logprobd
