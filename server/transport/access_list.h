#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/base/score_request.h"
#include "server/base/sha256.h"
#include "server/metrics/metrics.h"

namespace logprobd {

/// What a caller may do. Health, also that of HTTP, needs no scope.
enum class Scope {
  kScore,    ///< Score, ScoreStream and ListHeads.
  kVerify,   ///< Verify, which occupies the engine.
  kAdmin,    ///< The Weights service.
  kMetrics,  ///< The pages of HTTP: /metrics and the status page.
  kAny,      ///< Everything else, such as reflection: any entry will do.
};
inline constexpr size_t kNumScopes = 4;  ///< Scopes that an entry can have.

/// The name of a scope in a file of tokens.
absl::string_view ScopeName(Scope scope);

/// A token, or a name of client certificates, and what its callers may do.
struct AccessEntry {
  std::string id;  ///< Name of the token in logs, or the name that the certificate has.
  /// Digest of the token's text; absent in the entry of a certificate.
  std::optional<Sha256::Bytes> sha256;
  /// Whose work it is: all entries of a tenant share the tenant's part of the queue and of the
  /// answers that are not read.
  std::string tenant;
  std::array<bool, kNumScopes> scopes = {};
  absl::Time not_after = absl::InfiniteFuture();  ///< Time of the wall clock.
  double share = 0;  ///< Share of the queue, in (0, 1]; 0 means that of --client-share.
  Priority priority_max = Priority::kHigh;

  bool is_token() const { return sha256.has_value(); }
};

/// What a call shows of its caller.
struct Credentials {
  /// Value of the metadata key of that name, if it is there. An empty value is there.
  std::optional<absl::string_view> authorization = std::nullopt;
  /// Names of the client's certificate, which gRPC has verified; empty without one. See
  /// CredentialsOf.
  std::vector<absl::string_view> certificate_names = {};
};

class AccessList;

/// Who makes a call, for the log.
struct Caller {
  std::string token = "none";  ///< Id of the caller's token, if the server knows it.
  /// Name of the client's certificate: that of its entry, or else its first.
  std::string certificate = "none";
  std::string peer = {};  ///< "ipv4:127.0.0.1:50312" or "unix:"; empty if it is not known.
};

/// Returns the caller that shows `credentials`, whether it may do anything or not. `access` is null
/// if callers need no entry.
Caller CallerOf(const Credentials& credentials, const AccessList* access, std::string peer);

/// Counts callers that were refused because they are not in the list or lack a scope, and writes a
/// line for at most 20 of them in 10 s, at every log level. Thread-safe.
class AccessRefusals {
 public:
  /// `metrics` must outlive the object.
  explicit AccessRefusals(Metrics& metrics);

  /// `what` is what the caller wanted: a method or a path. `caller_of` is called only for
  /// lines that are logged, since it hashes a token. `reason` is an error of AccessList::Check.
  void Record(absl::string_view what, absl::FunctionRef<Caller()> caller_of,
              const absl::Status& reason);

 private:
  Metrics& metrics_;
  LogLimiter lines_;
};

/// The callers that the server accepts. Thread-safe.
class AccessList {
 public:
  /// `wall_now` returns the time of the wall clock.
  explicit AccessList(std::vector<AccessEntry> entries,
                      std::function<absl::Time()> wall_now = WallNow)
      : wall_now_(std::move(wall_now)) {
    Set(std::move(entries));
  }

  /// Replaces all entries for later calls.
  void Set(std::vector<AccessEntry> entries);

  /// Returns the entry of a caller: that of the token if there is an `authorization`, else the
  /// first entry in the list whose name the certificate has, byte by byte. The digest of a token is
  /// compared with those of all tokens in the same time. Returns UNAUTHENTICATED, which says what
  /// is missing, if there is none.
  absl::StatusOr<std::shared_ptr<const AccessEntry>> Identify(const Credentials& caller) const;

  /// Returns what Identify returns, or UNAUTHENTICATED if the entry has expired, and
  /// PERMISSION_DENIED if it lacks `scope`.
  absl::StatusOr<std::shared_ptr<const AccessEntry>> Check(const Credentials& caller,
                                                           Scope scope) const;

 private:
  using Entries = std::vector<std::shared_ptr<const AccessEntry>>;

  struct Lists {
    Entries tokens;
    std::vector<Sha256::Bytes> digests;  ///< Those of `tokens`.
    Entries certificates;
  };

  const std::function<absl::Time()> wall_now_;
  mutable absl::Mutex mutex_;
  std::shared_ptr<const Lists> lists_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
