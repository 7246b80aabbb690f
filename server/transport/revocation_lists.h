#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
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
class RevocationLists {
 public:
  struct List {
    std::string path;
    std::string issuer;
    std::string key;  ///< Two lists share it if the newer one replaces the other.
    absl::Time issued_at;
    absl::Time expires_at;  ///< Infinite if the list does not say.
    std::shared_ptr<X509_crl_st> crl;
  };
  struct Reading;

  /// Reads the lists of a folder and checks them with the certificates of the PEM text `client_ca`.
  /// Any file in `folder`, or to which a link there leads, that contains PEM lists counts, and so
  /// does one whose name is one of a list for `openssl rehash` (HASH.r0). Of several lists of an
  /// issuer, the newest is used.
  ///
  /// A list that cannot be used is a problem: it is damaged, is not signed by the CA of its name,
  /// or is of a kind that OpenSSL would ignore (indirect, a delta, or for some reasons only). A
  /// list of `last`, which may be null, stays in force where its CA has no list any more, or an
  /// older one; that is a problem, too. An expired list is none.
  static Reading Read(const std::string& folder, absl::string_view client_ca,
                      const RevocationLists* last);

  const std::vector<List>& lists() const { return lists_; }
  /// Returns the names of the CAs without a list, whose certificates nobody revokes.
  std::vector<std::string> WithoutList() const;
  /// Returns the time at which the first list expires.
  absl::Time FirstExpiry() const;

  /// Returns X509_V_OK, or OpenSSL's error for a certificate of a client. `untrusted` may contain
  /// its intermediate CAs. `verified` gets the certificates between it and its CA, and `refused`
  /// the name of the certificate that is at fault.
  int Verify(x509_st* certificate, stack_st_X509* untrusted, absl::Time now,
             std::vector<std::shared_ptr<x509_st>>& verified, std::string& refused) const;

 private:
  RevocationLists() = default;

  std::vector<std::shared_ptr<x509_st>> cas_;
  std::vector<List> lists_;
  std::shared_ptr<x509_store_st> store_;
};

struct RevocationLists::Reading {
  std::shared_ptr<const RevocationLists> lists;
  std::vector<std::string> problems;  ///< Each is a text that names a file or a CA.
  bool is_short = false;  ///< There was no file descriptor or memory for one of the files.
};

/// Returns the sorted names of the files in a folder of lists, without those that begin with a dot,
/// and sets `error` if it cannot be read.
std::vector<std::string> FilesOfListFolder(const std::string& folder, std::error_code& error);

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
