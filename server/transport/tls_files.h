#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/base/file_descriptor.h"
#include "server/metrics/metrics.h"
#include "server/transport/revocation_lists.h"

namespace logprobd {

/// Checked copies of the TLS files, which gRPC watches.
///
/// gRPC's own file watcher would also take a key that does not fit, or a file that is half written.
/// This class checks the files together and copies them into files that exist in memory only, so
/// that a process that is killed leaves no key behind. Invalid files leave the old copies in use.
/// Not thread-safe.
class TlsFiles {
 public:
  /// Paths of PEM files.
  struct Options {
    std::string cert = {};  ///< The server's certificate, followed by its chain.
    std::string key = {};   ///< The private key of the certificate, without a passphrase.
    /// CAs of clients, which must then have a certificate. May be empty.
    std::string client_ca = {};
    std::string crl_dir = {};  ///< Folder with revocation lists of the client CAs. May be empty.

    bool is_enabled() const { return !cert.empty(); }
    bool needs_client_certificates() const { return !client_ca.empty(); }
  };

  /// Interval at which ReloadIfChanged looks at the files.
  static constexpr absl::Duration kLookInterval = absl::Seconds(1);

  /// Returns the errors of an inconsistent set of paths, without a look at the files:
  /// INVALID_ARGUMENT that names the flag which is missing.
  static absl::Status CheckPaths(const Options& options);

  /// A certificate and its key, as PEM.
  struct Pair {
    std::string cert;  ///< The server's certificate, followed by its chain.
    std::string key;
  };

  /// Checks and copies the files. Returns FAILED_PRECONDITION that names the flag, the file and
  /// what is wrong: the file cannot be read, is not PEM, the key does not fit the certificate, the
  /// chain is not in order, a certificate is expired or not yet valid, or a revocation list cannot
  /// be used. An expired list is logged as an error and refuses the clients of its CA. Returns
  /// RESOURCE_EXHAUSTED if no file descriptor or no memory is left for the copies. `clock` measures
  /// intervals and `wall_now` returns the time of day; both, and `metrics`, must outlive the
  /// object.
  static absl::StatusOr<std::unique_ptr<TlsFiles>> Create(
      const Options& options, Metrics& metrics, const Clock& clock,
      std::function<absl::Time()> wall_now = WallNow);

  TlsFiles(const TlsFiles&) = delete;
  TlsFiles& operator=(const TlsFiles&) = delete;

  const Options& options() const { return options_; }
  /// What checks the certificates of clients with the lists in force, or null without
  /// --tls-crl-dir.
  const std::shared_ptr<RevocationCheck>& revocation() const { return revocation_; }
  /// The pair in use.
  const Pair& pair() const { return pair_; }
  /// Return the paths of the copies, which stay the same and are valid in this process only, while
  /// the object exists. The pair is one file, so that a reader never sees a key of another
  /// certificate.
  std::string pair_path() const;
  std::string client_ca_path() const;

  /// Makes Reload give each checked pair to `take` before it replaces the copies, for a listener
  /// with another TLS library than gRPC's. An error of `take` refuses the pair for all. `take` is
  /// called on the thread that reloads, and not for the pair of Create.
  void SetTaker(std::function<absl::Status(const Pair&)> take) { take_ = std::move(take); }

  /// Checks the files and replaces the copies. On an error the copies stay, and so does each
  /// revocation list that would be replaced by none or by one that cannot be used. The pair, the
  /// CAs of clients and the lists are taken each by itself. The result is logged and counted.
  /// Returns whether all of them were taken.
  bool Reload();

  /// Does what Reload does if the files have changed since they were last read, in the look after
  /// the one that has seen a change, because a certificate and its key are rarely written at once.
  /// Looks at the files at most once in each kLookInterval, so it may be called often. What failed
  /// with RESOURCE_EXHAUSTED is tried again at each look, and logged and counted again only with
  /// another result. Returns whether the copies were replaced.
  bool ReloadIfChanged();

 private:
  TlsFiles(Options options, Metrics& metrics, const Clock& clock,
           std::function<absl::Time()> wall_now);
  /// Checks the files and makes their copies and lists current.
  absl::Status Install();
  absl::Status InstallPair();
  absl::Status InstallClientCa();
  absl::Status InstallLists();
  /// Logs each list that has expired since the last call.
  void ReportExpiredLists();
  /// Logs and counts a result of Install, and returns whether it is OK.
  bool Report(const absl::Status& installed);
  /// Returns a text that changes whenever a file does.
  std::string Stamp() const;

  const Options options_;
  Metrics& metrics_;
  const Clock& clock_;
  const std::function<absl::Time()> wall_now_;
  std::function<absl::Status(const Pair&)> take_ = [](const Pair&) { return absl::OkStatus(); };
  Pair pair_;
  FileDescriptor pair_file_;  ///< Of the copies. Their numbers stay the same.
  FileDescriptor client_ca_file_;
  std::string client_ca_;                         ///< The certificates of the copy in use.
  std::shared_ptr<RevocationCheck> revocation_;   ///< Null without lists, like `lists_`.
  std::shared_ptr<const RevocationLists> lists_;  ///< In force.
  absl::Time expiry_reported_ = absl::InfinitePast();
  int generation_ = 0;                ///< Number of copies made.
  bool is_out_of_resources_ = false;  ///< Install has last failed with RESOURCE_EXHAUSTED.
  std::string tried_stamp_;           ///< State of the files that Install last saw.
  bool is_change_seen_ = false;       ///< The last look has found another state.
  absl::Time next_look_;
};

}  // namespace logprobd
