#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/metrics/metrics.h"

// OpenSSL's types.
struct stack_st_X509;
struct x509_st;
struct X509_crl_st;
struct x509_store_st;

namespace logprobd {

/// The revocation lists in force, and the CAs of clients that they are checked with. Immutable and
/// thread-safe.
///
/// A certificate is judged by the lists that have its issuer's name and are signed by the key of
/// its issuer in the verified chain. What else a list says of its issuer (its authority key
/// identifier) is not looked at, since OpenSSL takes a list for none where that does not fit.
class RevocationLists {
 public:
  /// A time of issue, and the bytes of the list's number behind their count. The greater is newer.
  using Age = std::tuple<absl::Time, size_t, std::string>;

  struct List {
    std::string path;
    std::string issuer;
    /// Public key of the CA that has signed it. Empty for a list of an intermediate CA that only
    /// clients show, whose signature is verified then.
    std::string signer;
    std::string key;  ///< Of two lists that share it, the newer one replaces the other.
    Age age;
    absl::Time expires_at;  ///< Infinite if the list does not say.
    std::shared_ptr<X509_crl_st> crl;
  };
  struct ReadResult;

  /// Reads the lists of a folder and checks them with the certificates of the PEM text `client_ca`.
  /// Any file in `folder`, or to which a link there leads, counts that is a list of DER or contains
  /// lists of PEM. Of several lists of an issuer, the newest is used, or all that are equally new.
  ///
  /// A list that cannot be used is a problem: it is damaged, is not signed by the CA of its name,
  /// or may not tell all revoked certificates of its CA (a delta, one with a distribution point, or
  /// with a critical extension that is unknown). So is a file without a list that is empty or whose
  /// name is that of a list: *.crl, *crl*.pem, or that of `openssl rehash` (HASH.r0). A list of
  /// `last`, which may be null, stays in force where its CA has no list any more, or an older one;
  /// that is a problem, too. An expired list is none.
  static ReadResult Read(const std::string& folder, absl::string_view client_ca,
                         const RevocationLists* last);

  const std::vector<List>& lists() const { return lists_; }
  /// Returns the names and serial numbers of the CAs without a list, whose certificates nobody
  /// revokes.
  std::vector<std::string> WithoutList() const;
  /// Returns the time at which the first list expires.
  absl::Time FirstExpiry() const;

  struct Verdict {
    int error = 0;              ///< X509_V_OK, or OpenSSL's error.
    std::string at_fault = {};  ///< Name of the certificate that the error is about.
    /// The certificates between that of the client and its CA, if they are verified.
    std::vector<std::shared_ptr<x509_st>> intermediates = {};
  };

  /// Judges a certificate of a client. `untrusted` may contain its intermediate CAs. Refuses it, or
  /// one of these, also if a list has expired, or if the only lists with the name of its issuer are
  /// of an intermediate CA with another key.
  Verdict Verify(x509_st* certificate, stack_st_X509* untrusted, absl::Time now) const;

 private:
  RevocationLists() = default;
  /// Returns a verified chain and the trusted certificates above it, each followed by its issuer.
  /// The last is null, or issuer of the one before and among the others.
  std::vector<x509_st*> PathOf(const stack_st_X509* chain) const;
  /// Returns X509_V_OK, or OpenSSL's error. If `issuer` is null, the lists of its name count that
  /// no trusted CA has signed.
  int Judge(x509_st* certificate, const x509_st* issuer, absl::Time now) const;

  std::vector<std::shared_ptr<x509_st>> cas_;
  std::vector<List> lists_;
  std::shared_ptr<x509_store_st> store_;
};

struct RevocationLists::ReadResult {
  std::shared_ptr<const RevocationLists> lists;
  std::vector<std::string> problems;  ///< Each is a text that names a file or a CA.
  bool is_out_of_resources = false;   ///< No file descriptor or memory was left for a file.
};

/// Returns the sorted names of the files in a folder of lists, without those that begin with a dot.
/// Returns RESOURCE_EXHAUSTED if no file descriptor or no memory is left, and FAILED_PRECONDITION
/// if the folder cannot be read or has too many files.
absl::StatusOr<std::vector<std::string>> FilesOfListFolder(const std::string& folder);

/// Refuses clients whose certificate is revoked, or whose CA's list has expired. Thread-safe.
class RevocationCheck {
 public:
  RevocationCheck(Metrics& metrics, std::function<absl::Time()> wall_now);

  /// Replaces the lists for later connections.
  void Set(std::shared_ptr<const RevocationLists> lists);

  /// Judges a client by its certificate and the chain that it sent, as PEM; the chain may be empty,
  /// as it is in a TLS session that is resumed. Returns PERMISSION_DENIED with the reason, counts
  /// and, within a limit, logs it.
  absl::Status Check(absl::string_view certificate, absl::string_view chain);

 private:
  /// A resumed session has the client's certificate only, so intermediate CAs are remembered.
  static constexpr size_t kIntermediatesMax = 256;

  Metrics& metrics_;
  const std::function<absl::Time()> wall_now_;
  LogLimiter lines_;
  absl::Mutex mutex_;
  std::shared_ptr<const RevocationLists> lists_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<x509_st>> intermediates_
      ABSL_GUARDED_BY(mutex_);  ///< By DER.
};

}  // namespace logprobd
