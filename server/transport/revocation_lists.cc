#include "server/transport/revocation_lists.h"

#include <openssl/asn1.h>
#include <openssl/err.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/transport/pem.h"

namespace logprobd {
namespace {

constexpr absl::string_view kFlag = "--tls-crl-dir";
constexpr absl::string_view kBegin = "-----BEGIN X509 CRL-----";
/// The largest lists of public CAs have some 10 MiB.
constexpr int64_t kListMebibytesMax = 64;
/// Each look at the folder takes some microseconds for each file.
constexpr size_t kFilesMax = 4096;

using List = RevocationLists::List;
using Stack = std::unique_ptr<STACK_OF(X509), void (*)(STACK_OF(X509)*)>;
using Context = std::unique_ptr<X509_STORE_CTX, decltype(&X509_STORE_CTX_free)>;

std::shared_ptr<X509> Shared(Certificate certificate) { return {certificate.release(), X509_free}; }

/// Returns whether `openssl rehash` gives such a name to a list: eight digits, ".r" and a number.
bool IsListName(absl::string_view name) {
  constexpr size_t kHashDigits = 8;
  return name.size() > kHashDigits + 2 && name.substr(kHashDigits, 2) == ".r" &&
         absl::c_all_of(name.substr(0, kHashDigits), absl::ascii_isxdigit) &&
         absl::c_all_of(name.substr(kHashDigits + 2), absl::ascii_isdigit);
}

std::string TextOf(const ASN1_STRING* data) {
  return {reinterpret_cast<const char*>(ASN1_STRING_get0_data(data)),
          static_cast<size_t>(ASN1_STRING_length(data))};
}

/// Returns the content of an extension, or an empty text.
std::string ExtensionOf(X509_CRL* crl, int nid) {
  const int index = X509_CRL_get_ext_by_NID(crl, nid, -1);
  return index < 0 ? "" : TextOf(X509_EXTENSION_get_data(X509_CRL_get_ext(crl, index)));
}

/// Returns why OpenSSL would ignore a list, or an empty text.
std::string Unsupported(X509_CRL* crl) {
  if (X509_CRL_get_ext_by_NID(crl, NID_delta_crl, -1) >= 0) return "is a delta of another list";
  if (X509_CRL_get_ext_by_NID(crl, NID_issuing_distribution_point, -1) < 0) return "";
  const std::unique_ptr<ISSUING_DIST_POINT, decltype(&ISSUING_DIST_POINT_free)> scope(
      static_cast<ISSUING_DIST_POINT*>(
          X509_CRL_get_ext_d2i(crl, NID_issuing_distribution_point, nullptr, nullptr)),
      ISSUING_DIST_POINT_free);
  if (scope == nullptr) return "has a damaged distribution point";
  if (scope->indirectCRL > 0) return "is an indirect list, with certificates of other CAs";
  return scope->onlysomereasons == nullptr ? "" : "is for some reasons only";
}

/// Returns what identifies the key that has signed `crl`, and nothing if none of the CAs with the
/// name of its issuer has. Without such a CA an intermediate one has issued it, which a client will
/// show.
std::optional<std::string> SignerOf(X509_CRL* crl, const std::vector<std::shared_ptr<X509>>& cas) {
  bool is_known = false;
  for (const std::shared_ptr<X509>& ca : cas) {
    if (X509_NAME_cmp(X509_get_subject_name(ca.get()), X509_CRL_get_issuer(crl)) != 0) continue;
    is_known = true;
    if (X509_CRL_verify(crl, X509_get0_pubkey(ca.get())) == 1) {
      return TextOf(X509_get0_pubkey_bitstr(ca.get()));
    }
  }
  ERR_clear_error();
  if (is_known) return std::nullopt;
  return ExtensionOf(crl, NID_authority_key_identifier);
}

/// Appends the lists of a file to `lists`, and what is wrong with it to the problems of `reading`.
void ReadFile(const std::string& path, bool has_list_name,
              const std::vector<std::shared_ptr<X509>>& cas, std::vector<List>& lists,
              RevocationLists::Reading& reading) {
  const absl::StatusOr<NamedFile> file = ReadNamedFile(kFlag, path, kListMebibytesMax);
  if (!file.ok()) {
    const bool is_short = absl::IsResourceExhausted(file.status());
    if (has_list_name || is_short) reading.problems.emplace_back(file.status().message());
    reading.is_short = reading.is_short || is_short;
    return;
  }
  if (!has_list_name && !absl::StrContains(file->content, kBegin)) return;
  const auto wrong = [&](absl::string_view what) {
    reading.problems.emplace_back(Wrong(*file, what).message());
  };
  bool is_damaged = false;
  std::vector<Crl> found = ParseRevocationLists(file->content, is_damaged);
  if (is_damaged || found.empty()) {
    wrong(found.empty() ? absl::StrCat("contains no PEM revocation list (", kBegin, ")")
                        : absl::StrCat("is damaged after list ", found.size()));
  }
  for (Crl& crl : found) {
    const std::string issuer = NameOf(X509_CRL_get_issuer(crl.get()));
    if (const std::string what = Unsupported(crl.get()); !what.empty()) {
      wrong(absl::StrCat(what, ", which is not supported"));
      continue;
    }
    const std::optional<std::string> signer = SignerOf(crl.get(), cas);
    if (!signer.has_value()) {
      wrong(absl::StrCat("is not signed by the CA of --tls-client-ca that it names, ", issuer));
      continue;
    }
    const ASN1_TIME* const next = X509_CRL_get0_nextUpdate(crl.get());
    lists.push_back({.path = path,
                     .issuer = issuer,
                     .key = absl::StrCat(issuer, "\n", *signer, "\n",
                                         ExtensionOf(crl.get(), NID_issuing_distribution_point)),
                     .issued_at = TimeOf(X509_CRL_get0_lastUpdate(crl.get())),
                     .expires_at = next == nullptr ? absl::InfiniteFuture() : TimeOf(next),
                     .crl = {crl.release(), X509_CRL_free}});
  }
}

/// The newest lists, by their key.
std::map<std::string, List> NewestOf(const std::vector<List>& lists) {
  std::map<std::string, List> newest;
  for (const List& list : lists) {
    const auto [entry, is_new] = newest.emplace(list.key, list);
    if (!is_new && entry->second.issued_at < list.issued_at) entry->second = list;
  }
  return newest;
}

/// Reads all files of a folder.
std::vector<List> ReadFolder(const std::string& folder,
                             const std::vector<std::shared_ptr<X509>>& cas,
                             RevocationLists::Reading& reading) {
  std::vector<List> lists;
  std::error_code error;
  const std::vector<std::string> names = FilesOfListFolder(folder, error);
  if (error) {
    reading.problems.push_back(
        absl::StrCat(kFlag, ": ", folder, " cannot be read: ", error.message()));
    reading.is_short = error == std::errc::too_many_files_open ||
                       error == std::errc::too_many_files_open_in_system ||
                       error == std::errc::not_enough_memory;
    return lists;
  }
  if (names.size() > kFilesMax) {
    reading.problems.push_back(
        absl::StrCat(kFlag, ": ", folder, " has more than ", kFilesMax, " files"));
    return lists;
  }
  std::set<std::pair<dev_t, ino_t>> seen;  // A list and its link are one file.
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(folder, "/", name);
    const bool has_list_name = IsListName(name);
    struct stat info {};
    const bool is_found = stat(path.c_str(), &info) == 0;
    if (is_found && !seen.emplace(info.st_dev, info.st_ino).second) continue;
    if (has_list_name || (is_found && S_ISREG(info.st_mode))) {
      ReadFile(path, has_list_name, cas, lists, reading);
    }
  }
  return lists;
}

/// Lets certificates pass whose CA has no list, and lists that a CA with a faster clock has issued.
int OnVerifyError(int is_ok, X509_STORE_CTX* context) {
  const int error = X509_STORE_CTX_get_error(context);
  return is_ok != 0 || error == X509_V_ERR_UNABLE_TO_GET_CRL ||
                 error == X509_V_ERR_CRL_NOT_YET_VALID
             ? 1
             : 0;
}

std::shared_ptr<X509_STORE> StoreOf(const std::vector<std::shared_ptr<X509>>& cas,
                                    const std::vector<List>& lists) {
  const std::shared_ptr<X509_STORE> store(X509_STORE_new(), X509_STORE_free);
  for (const std::shared_ptr<X509>& ca : cas) X509_STORE_add_cert(store.get(), ca.get());
  for (const List& list : lists) X509_STORE_add_crl(store.get(), list.crl.get());
  // The last two are those with which gRPC verifies.
  X509_STORE_set_flags(store.get(), X509_V_FLAG_CRL_CHECK | X509_V_FLAG_CRL_CHECK_ALL |
                                        X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST);
  X509_STORE_set_verify_cb(store.get(), OnVerifyError);
  return store;
}

std::string DerOf(X509* certificate) {
  unsigned char* data = nullptr;
  const int length = i2d_X509(certificate, &data);
  std::string der(reinterpret_cast<char*>(data), static_cast<size_t>(std::max(length, 0)));
  OPENSSL_free(data);
  return der;
}

}  // namespace

std::vector<std::string> FilesOfListFolder(const std::string& folder, std::error_code& error) {
  std::vector<std::string> names;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    std::string name = entry->path().filename().string();
    if (!absl::StartsWith(name, ".")) names.push_back(std::move(name));
    if (names.size() > kFilesMax) break;
  }
  absl::c_sort(names);
  return names;
}

RevocationLists::Reading RevocationLists::Read(const std::string& folder,
                                               absl::string_view client_ca,
                                               const RevocationLists* last) {
  const std::shared_ptr<RevocationLists> result(new RevocationLists());
  Reading reading;
  bool is_damaged = false;
  for (Certificate& ca : ParseCertificates(client_ca, is_damaged)) {
    result->cas_.push_back(Shared(std::move(ca)));
  }
  std::map<std::string, List> newest = NewestOf(ReadFolder(folder, result->cas_, reading));
  const auto has_ca = [](const RevocationLists& lists, const std::string& name) {
    return absl::c_any_of(lists.cas_, [&name](const std::shared_ptr<X509>& ca) {
      return NameOf(X509_get_subject_name(ca.get())) == name;
    });
  };
  for (const List& before : last == nullptr ? std::vector<List>() : last->lists_) {
    if (has_ca(*last, before.issuer) && (!has_ca(*result, before.issuer) ||
                                         !SignerOf(before.crl.get(), result->cas_).has_value())) {
      continue;  // Its CA is no longer trusted, or has another key.
    }
    const auto [entry, is_missing] = newest.emplace(before.key, before);
    if (!is_missing && before.issued_at <= entry->second.issued_at) continue;
    reading.problems.push_back(is_missing ? absl::StrCat(kFlag, ": ", before.path, ", the list of ",
                                                         before.issuer, ", has no successor")
                                          : absl::StrCat(kFlag, ": ", entry->second.path,
                                                         " is older than the list of ",
                                                         before.issuer, " in force"));
    entry->second = before;
  }
  for (auto& [key, list] : newest) result->lists_.push_back(std::move(list));
  result->store_ = StoreOf(result->cas_, result->lists_);
  ERR_clear_error();
  reading.lists = result;
  return reading;
}

std::vector<std::string> RevocationLists::WithoutList() const {
  std::vector<std::string> names;
  for (const std::shared_ptr<X509>& ca : cas_) {
    std::string name = NameOf(X509_get_subject_name(ca.get()));
    if (absl::c_none_of(lists_, [&name](const List& list) { return list.issuer == name; })) {
      names.push_back(std::move(name));
    }
  }
  return names;
}

absl::Time RevocationLists::FirstExpiry() const {
  absl::Time first = absl::InfiniteFuture();
  for (const List& list : lists_) first = std::min(first, list.expires_at);
  return first;
}

int RevocationLists::Verify(x509_st* certificate, stack_st_X509* untrusted, absl::Time now,
                            std::vector<std::shared_ptr<X509>>& verified,
                            std::string& refused) const {
  const Context context(X509_STORE_CTX_new(), X509_STORE_CTX_free);
  if (context == nullptr ||
      X509_STORE_CTX_init(context.get(), store_.get(), certificate, untrusted) != 1 ||
      X509_STORE_CTX_set_default(context.get(), "ssl_client") != 1) {
    return X509_V_ERR_OUT_OF_MEM;
  }
  X509_VERIFY_PARAM_set_time(X509_STORE_CTX_get0_param(context.get()), absl::ToTimeT(now));
  const bool is_verified = X509_verify_cert(context.get()) == 1;
  ERR_clear_error();
  if (!is_verified) {
    X509* const at_fault = X509_STORE_CTX_get_current_cert(context.get());
    refused = NameOf(X509_get_subject_name(at_fault == nullptr ? certificate : at_fault));
    const int error = X509_STORE_CTX_get_error(context.get());
    return error == X509_V_OK ? X509_V_ERR_UNSPECIFIED : error;
  }
  STACK_OF(X509)* const chain = X509_STORE_CTX_get0_chain(context.get());
  for (int i = 1; i + 1 < sk_X509_num(chain); ++i) {
    X509* const intermediate = sk_X509_value(chain, i);
    X509_up_ref(intermediate);
    verified.emplace_back(intermediate, X509_free);
  }
  return X509_V_OK;
}

RevocationCheck::RevocationCheck(Metrics& metrics, std::function<absl::Time()> wall_now)
    : metrics_(metrics), wall_now_(std::move(wall_now)), lines_(Clock::Steady()) {}

void RevocationCheck::Set(std::shared_ptr<const RevocationLists> lists) {
  const absl::MutexLock lock(&mutex_);
  lists_ = std::move(lists);
}

absl::Status RevocationCheck::Check(absl::string_view certificate, absl::string_view chain) {
  bool is_damaged = false;
  const std::vector<Certificate> own = ParseCertificates(certificate, is_damaged);
  const std::vector<Certificate> sent = ParseCertificates(chain, is_damaged);
  const Stack untrusted(sk_X509_new_null(), [](STACK_OF(X509) * stack) { sk_X509_free(stack); });
  for (const Certificate& each : sent) sk_X509_push(untrusted.get(), each.get());
  std::shared_ptr<const RevocationLists> lists;
  std::vector<std::shared_ptr<X509>> known;  // Keeps them alive without the lock.
  {
    const absl::MutexLock lock(&mutex_);
    lists = lists_;
    for (const auto& [der, intermediate] : intermediates_) known.push_back(intermediate);
  }
  for (const std::shared_ptr<X509>& each : known) sk_X509_push(untrusted.get(), each.get());

  std::vector<std::shared_ptr<X509>> verified;
  std::string refused;
  const int error = own.empty() ? X509_V_ERR_UNSPECIFIED
                                : lists->Verify(own.front().get(), untrusted.get(), wall_now_(),
                                                verified, refused);
  if (error == X509_V_OK) {
    const absl::MutexLock lock(&mutex_);
    for (const std::shared_ptr<X509>& each : verified) {
      intermediates_.emplace(DerOf(each.get()), each);
      if (intermediates_.size() > kIntermediatesMax) intermediates_.erase(intermediates_.begin());
    }
    return absl::OkStatus();
  }
  metrics_.RecordTlsRefusal(error == X509_V_ERR_CERT_REVOKED ? Metrics::TlsRefusal::kRevoked
                            : error == X509_V_ERR_CRL_HAS_EXPIRED
                                ? Metrics::TlsRefusal::kListExpired
                                : Metrics::TlsRefusal::kOther);
  const std::string reason = X509_verify_cert_error_string(error);
  if (const std::optional<int64_t> suppressed = lines_.Admit(); suppressed.has_value()) {
    const LogField fields[] = {
        {"certificate", own.empty() ? "" : NameOf(X509_get_subject_name(own.front().get()))},
        {"at_fault", refused},
        {"reason", reason},
        {"lines_suppressed", *suppressed}};
    LogAlways(LogLevel::kWarning, "a client's certificate was refused", fields);
  }
  return absl::PermissionDeniedError(reason);
}

}  // namespace logprobd
