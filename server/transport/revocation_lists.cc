#include "server/transport/revocation_lists.h"

#include <openssl/asn1.h>
#include <openssl/err.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/transport/pem.h"

namespace logprobd {
namespace {

constexpr absl::string_view kFlag = "--tls-crl-dir";
/// The largest lists of public CAs have some 10 MiB.
constexpr int64_t kListMebibytesMax = 64;
/// Each look at the folder takes some microseconds for each file.
constexpr size_t kFilesMax = 4096;

using List = RevocationLists::List;
using Stack = std::unique_ptr<STACK_OF(X509), void (*)(STACK_OF(X509)*)>;
using Context = std::unique_ptr<X509_STORE_CTX, decltype(&X509_STORE_CTX_free)>;

std::shared_ptr<X509> Shared(Certificate certificate) { return {certificate.release(), X509_free}; }

/// Returns whether a file should contain a list. `openssl rehash` gives one a name of eight digits,
/// ".r" and a number.
bool IsListName(const std::string& name) {
  const std::string lower = absl::AsciiStrToLower(name);
  if (absl::EndsWith(lower, ".crl")) return true;
  if (absl::EndsWith(lower, ".pem") && absl::StrContains(lower, "crl")) return true;
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

/// Returns the public key of a CA. Certificates that are issued again may share it.
std::string KeyOf(const X509* ca) { return TextOf(X509_get0_pubkey_bitstr(ca)); }

RevocationLists::Age AgeOf(X509_CRL* crl) {
  const std::unique_ptr<ASN1_INTEGER, decltype(&ASN1_INTEGER_free)> number(
      static_cast<ASN1_INTEGER*>(X509_CRL_get_ext_d2i(crl, NID_crl_number, nullptr, nullptr)),
      ASN1_INTEGER_free);
  const std::string bytes = number == nullptr ? "" : TextOf(number.get());
  return {TimeOf(X509_CRL_get0_lastUpdate(crl)), bytes.size(), bytes};
}

/// Returns why a list may not say all that it must of the certificates of its CA, or an empty text.
std::string Unsupported(X509_CRL* crl) {
  if (TimeOf(X509_CRL_get0_lastUpdate(crl)) == absl::InfinitePast()) return "has a malformed time";
  if (X509_CRL_get_ext_by_NID(crl, NID_delta_crl, -1) >= 0) return "is a delta of another list";
  if (X509_CRL_get_ext_by_NID(crl, NID_issuing_distribution_point, -1) >= 0) {
    return "has an issuing distribution point, so it may be for a part of its CA's certificates or "
           "for those of others";
  }
  for (int i = -1; (i = X509_CRL_get_ext_by_critical(crl, 1, i)) >= 0;) {
    const int nid = OBJ_obj2nid(X509_EXTENSION_get_object(X509_CRL_get_ext(crl, i)));
    if (nid != NID_authority_key_identifier && nid != NID_crl_number) {
      return "has a critical extension that is unknown";
    }
  }
  const STACK_OF(X509_REVOKED)* const entries = X509_CRL_get_REVOKED(crl);
  for (int i = 0; i < sk_X509_REVOKED_num(entries); ++i) {
    const X509_REVOKED* const entry = sk_X509_REVOKED_value(entries, i);
    if (X509_REVOKED_get_ext_by_critical(entry, 1, -1) >= 0 ||
        X509_REVOKED_get_ext_by_NID(entry, NID_certificate_issuer, -1) >= 0) {
      return "has an entry with a critical extension or of another CA";
    }
  }
  return "";
}

/// Returns the key that has signed `crl`, and nothing if none of the CAs with the name of its
/// issuer has. The key is empty if there is no such CA: then an intermediate one has issued it,
/// which a client will show.
std::optional<std::string> SignerOf(X509_CRL* crl, const std::vector<std::shared_ptr<X509>>& cas) {
  bool is_known = false;
  for (const std::shared_ptr<X509>& ca : cas) {
    if (X509_NAME_cmp(X509_get_subject_name(ca.get()), X509_CRL_get_issuer(crl)) != 0) continue;
    is_known = true;
    if (X509_CRL_verify(crl, X509_get0_pubkey(ca.get())) == 1) return KeyOf(ca.get());
  }
  ERR_clear_error();
  if (is_known) return std::nullopt;
  return "";
}

/// Sets who has signed a list.
void SetSigner(List& list, std::string signer) {
  // The keys of intermediate CAs are unknown, but they should have names of their own.
  list.key = absl::StrCat(
      list.issuer, "\n",
      signer.empty() ? ExtensionOf(list.crl.get(), NID_authority_key_identifier) : signer);
  list.signer = std::move(signer);
}

/// Appends the lists of a file to `lists`, and what is wrong with it to the problems of `reading`.
void ReadFile(const std::string& path, bool has_list_name,
              const std::vector<std::shared_ptr<X509>>& cas, std::vector<List>& lists,
              RevocationLists::ReadResult& reading) {
  const absl::StatusOr<NamedFile> file = ReadNamedFile(kFlag, path, kListMebibytesMax);
  if (!file.ok()) {
    const bool is_out_of_resources = absl::IsResourceExhausted(file.status());
    // A file that cannot be read may be a list, whatever its name is, unless it is gone.
    if (has_list_name || is_out_of_resources || access(path.c_str(), F_OK) == 0) {
      reading.problems.emplace_back(file.status().message());
    }
    reading.is_out_of_resources = reading.is_out_of_resources || is_out_of_resources;
    return;
  }
  const auto wrong = [&](absl::string_view what) {
    reading.problems.emplace_back(Wrong(*file, what).message());
  };
  auto [found, is_damaged] = ParseRevocationLists(file->content);
  if (found.empty()) {
    if (has_list_name || file->content.empty() || is_damaged) {
      wrong("contains no revocation list of PEM (-----BEGIN X509 CRL-----) or DER");
    }
    return;
  }
  if (is_damaged) {
    wrong(absl::StrCat("is damaged: only ", found.size(), " of its lists can be read"));
  }
  for (Crl& crl : found) {
    List list{.path = path,
              .issuer = NameOf(X509_CRL_get_issuer(crl.get())),
              .signer = "",
              .key = "",
              .age = AgeOf(crl.get()),
              .expires_at = absl::InfiniteFuture(),
              .crl = {crl.release(), X509_CRL_free}};
    if (const std::string what = Unsupported(list.crl.get()); !what.empty()) {
      wrong(absl::StrCat(what, ", which is not supported"));
      continue;
    }
    std::optional<std::string> signer = SignerOf(list.crl.get(), cas);
    if (!signer.has_value()) {
      wrong("is not signed by the CA of --tls-client-ca that it names, " + list.issuer);
      continue;
    }
    SetSigner(list, *std::move(signer));
    const ASN1_TIME* const next = X509_CRL_get0_nextUpdate(list.crl.get());
    if (next != nullptr) list.expires_at = TimeOf(next);
    lists.push_back(std::move(list));
  }
}

/// Returns the newest list by each key.
std::map<std::string, List> NewestOf(const std::vector<List>& lists) {
  std::map<std::string, List> newest;
  for (const List& list : lists) {
    const auto [entry, is_new] = newest.emplace(list.key, list);
    if (!is_new && entry->second.age < list.age) entry->second = list;
  }
  return newest;
}

/// Reads all files of a folder.
std::vector<List> ReadFolder(const std::string& folder,
                             const std::vector<std::shared_ptr<X509>>& cas,
                             RevocationLists::ReadResult& reading) {
  std::vector<List> lists;
  const absl::StatusOr<std::vector<std::string>> names = FilesOfListFolder(folder);
  if (!names.ok()) {
    reading.problems.emplace_back(names.status().message());
    reading.is_out_of_resources = absl::IsResourceExhausted(names.status());
    return lists;
  }
  std::set<std::pair<dev_t, ino_t>> seen;  // A list and its link are one file.
  for (const std::string& name : *names) {
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

std::shared_ptr<X509_STORE> StoreOf(const std::vector<std::shared_ptr<X509>>& cas) {
  std::shared_ptr<X509_STORE> store(X509_STORE_new(), X509_STORE_free);
  for (const std::shared_ptr<X509>& ca : cas) X509_STORE_add_cert(store.get(), ca.get());
  // With these gRPC verifies.
  X509_STORE_set_flags(store.get(), X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST);
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

absl::StatusOr<std::vector<std::string>> FilesOfListFolder(const std::string& folder) {
  const NamedFile named{kFlag, folder, ""};
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    std::string name = entry->path().filename().string();
    if (!absl::StartsWith(name, ".")) names.push_back(std::move(name));
    if (names.size() > kFilesMax) {
      return Wrong(named, absl::StrCat("has more than ", kFilesMax, " files"));
    }
  }
  if (error) return CannotRead(named, error.value());
  absl::c_sort(names);
  return names;
}

RevocationLists::ReadResult RevocationLists::Read(const std::string& folder,
                                                  absl::string_view client_ca,
                                                  const RevocationLists* last) {
  const std::shared_ptr<RevocationLists> result(new RevocationLists());
  ReadResult reading;
  for (Certificate& ca : ParseCertificates(client_ca).objects) {
    result->cas_.push_back(Shared(std::move(ca)));
  }
  std::vector<List> lists = ReadFolder(folder, result->cas_, reading);
  const std::map<std::string, List> found = NewestOf(lists);
  for (List before : last == nullptr ? std::vector<List>() : last->lists_) {
    std::string signer = SignerOf(before.crl.get(), result->cas_).value_or("");
    // Its CA is no longer trusted, or has another key.
    if (signer.empty() && !before.signer.empty()) continue;
    SetSigner(before, std::move(signer));
    const auto successor = found.find(before.key);
    const bool is_missing = successor == found.end();
    if (!is_missing && before.age <= successor->second.age) continue;
    reading.problems.push_back(is_missing ? absl::StrCat(kFlag, ": ", before.path, ", the list of ",
                                                         before.issuer, ", has no successor")
                                          : absl::StrCat(kFlag, ": ", successor->second.path,
                                                         " is older than the list of ",
                                                         before.issuer, " in force"));
    lists.push_back(std::move(before));
  }
  const std::map<std::string, List> newest = NewestOf(lists);
  for (List& list : lists) {
    if (list.age == newest.at(list.key).age) result->lists_.push_back(std::move(list));
  }
  result->store_ = StoreOf(result->cas_);
  ERR_clear_error();
  reading.lists = result;
  return reading;
}

std::vector<std::string> RevocationLists::WithoutList() const {
  std::vector<std::string> names;
  for (const std::shared_ptr<X509>& ca : cas_) {
    const X509_NAME* const name = X509_get_subject_name(ca.get());
    const bool has_list = absl::c_any_of(lists_, [&](const List& list) {
      return X509_NAME_cmp(X509_CRL_get_issuer(list.crl.get()), name) == 0 &&
             list.signer == KeyOf(ca.get());
    });
    if (has_list) continue;
    const std::string serial = TextOf(X509_get0_serialNumber(ca.get()));
    names.push_back(absl::StrCat(NameOf(name), " (serial ", absl::BytesToHexString(serial), ")"));
  }
  return names;
}

absl::Time RevocationLists::FirstExpiry() const {
  absl::Time first = absl::InfiniteFuture();
  for (const List& list : lists_) first = std::min(first, list.expires_at);
  return first;
}

RevocationLists::Verdict RevocationLists::Verify(x509_st* certificate, stack_st_X509* untrusted,
                                                 absl::Time now) const {
  const Context context(X509_STORE_CTX_new(), X509_STORE_CTX_free);
  if (context == nullptr ||
      X509_STORE_CTX_init(context.get(), store_.get(), certificate, untrusted) != 1 ||
      X509_STORE_CTX_set_default(context.get(), "ssl_client") != 1) {
    return {.error = X509_V_ERR_OUT_OF_MEM};
  }
  const auto refused = [](int error, const X509* at_fault) {
    return Verdict{.error = error, .at_fault = NameOf(X509_get_subject_name(at_fault))};
  };
  X509_VERIFY_PARAM_set_time(X509_STORE_CTX_get0_param(context.get()), absl::ToTimeT(now));
  if (X509_verify_cert(context.get()) != 1) {
    const X509* const at_fault = X509_STORE_CTX_get_current_cert(context.get());
    const int error = X509_STORE_CTX_get_error(context.get());
    return refused(error == X509_V_OK ? X509_V_ERR_UNSPECIFIED : error,
                   at_fault == nullptr ? certificate : at_fault);
  }
  STACK_OF(X509)* const chain = X509_STORE_CTX_get0_chain(context.get());
  const std::vector<X509*> path = PathOf(chain);
  for (size_t i = 0; i + 1 < path.size(); ++i) {
    if (const int error = Judge(path[i], path[i + 1], now); error != X509_V_OK) {
      return refused(error, path[i]);
    }
  }
  Verdict verdict;
  for (int i = 1; i + 1 < sk_X509_num(chain); ++i) {
    X509* const intermediate = sk_X509_value(chain, i);
    X509_up_ref(intermediate);
    verdict.intermediates.emplace_back(intermediate, X509_free);
  }
  return verdict;
}

std::vector<X509*> RevocationLists::PathOf(const STACK_OF(X509) * chain) const {
  std::vector<X509*> path;
  path.reserve(static_cast<size_t>(sk_X509_num(chain)));
  for (int i = 0; i < sk_X509_num(chain); ++i) path.push_back(sk_X509_value(chain, i));
  // The chain ends with the first trusted certificate, which another trusted one may revoke.
  const auto is_next = [&path](const std::shared_ptr<X509>& ca) {
    return X509_NAME_cmp(X509_get_subject_name(ca.get()), X509_get_issuer_name(path.back())) == 0 &&
           X509_verify(path.back(), X509_get0_pubkey(ca.get())) == 1;
  };
  for (bool is_end = false; !is_end;) {
    const auto next = absl::c_find_if(cas_, is_next);
    X509* const issuer = next == cas_.end() ? nullptr : next->get();
    is_end = issuer == nullptr || absl::c_linear_search(path, issuer);
    path.push_back(issuer);
  }
  return path;
}

int RevocationLists::Judge(X509* certificate, const X509* issuer, absl::Time now) const {
  const auto is_signed = [issuer](const List& list) {
    if (!list.signer.empty()) return issuer != nullptr && list.signer == KeyOf(issuer);
    return issuer == nullptr || X509_CRL_verify(list.crl.get(), X509_get0_pubkey(issuer)) == 1;
  };
  bool has_list = false;
  bool is_expired = false;
  bool has_unverified_list = false;
  for (const List& list : lists_) {
    if (X509_NAME_cmp(X509_CRL_get_issuer(list.crl.get()), X509_get_issuer_name(certificate)) !=
        0) {
      continue;
    }
    if (!is_signed(list)) {
      has_unverified_list = has_unverified_list || list.signer.empty();
      continue;
    }
    has_list = true;
    is_expired = is_expired || list.expires_at <= now;
    X509_REVOKED* entry = nullptr;
    if (X509_CRL_get0_by_cert(list.crl.get(), &entry, certificate) != 0) {
      return X509_V_ERR_CERT_REVOKED;
    }
  }
  if (is_expired) return X509_V_ERR_CRL_HAS_EXPIRED;
  return has_unverified_list && !has_list ? X509_V_ERR_CRL_SIGNATURE_FAILURE : X509_V_OK;
}

RevocationCheck::RevocationCheck(Metrics& metrics, std::function<absl::Time()> wall_now)
    : metrics_(metrics), wall_now_(std::move(wall_now)), lines_(Clock::Steady()) {}

void RevocationCheck::Set(std::shared_ptr<const RevocationLists> lists) {
  const absl::MutexLock lock(&mutex_);
  lists_ = std::move(lists);
}

absl::Status RevocationCheck::Check(absl::string_view certificate, absl::string_view chain) {
  const std::vector<Certificate> own = ParseCertificates(certificate).objects;
  const std::vector<Certificate> sent = ParseCertificates(chain).objects;
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

  RevocationLists::Verdict verdict{.error = X509_V_ERR_UNSPECIFIED};
  if (!own.empty()) verdict = lists->Verify(own.front().get(), untrusted.get(), wall_now_());
  const int error = verdict.error;
  ERR_clear_error();
  if (error == X509_V_OK) {
    const absl::MutexLock lock(&mutex_);
    for (const std::shared_ptr<X509>& each : verdict.intermediates) {
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
        {"at_fault", verdict.at_fault},
        {"reason", reason},
        {"lines_suppressed", *suppressed}};
    LogAlways(LogLevel::kWarning, "a client's certificate was refused", fields);
  }
  return absl::PermissionDeniedError(reason);
}

}  // namespace logprobd
