#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
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
  kAny,      ///< Everything else, such as reflection: any token will do.
};
inline constexpr size_t kNumScopes = 4;  ///< Scopes that a token can have.

/// The name of a scope in a file of tokens.
absl::string_view ScopeName(Scope scope);

/// A token as the server knows it.
struct AccessToken {
  std::string id;             ///< Name of the token in logs.
  Sha256::Bytes sha256 = {};  ///< Digest of the token's text.
  /// Whose work it is: all tokens of a tenant share the tenant's part of the queue and of the
  /// answers that are not read.
  std::string tenant;
  std::array<bool, kNumScopes> scopes = {};
  absl::Time not_after = absl::InfiniteFuture();  ///< Time of the wall clock.
  double share = 0;  ///< Share of the queue, in (0, 1]; 0 means that of --client-share.
  Priority priority_max = Priority::kHigh;
};

/// Counts callers that were refused for want of a token, and logs at most 20 of them in 10 s.
/// Thread-safe.
class TokenRefusals {
 public:
  /// `metrics` must outlive the object.
  explicit TokenRefusals(Metrics& metrics);

  /// `what` is what the caller wanted: a method or a path. `reason` is an error of
  /// AccessTokens::Check.
  void Record(absl::string_view what, const absl::Status& reason);

 private:
  Metrics& metrics_;
  LogLimiter lines_;
};

/// The tokens that the server accepts. Thread-safe.
class AccessTokens {
 public:
  explicit AccessTokens(std::vector<AccessToken> tokens) { Set(std::move(tokens)); }

  /// Replaces all tokens for later calls.
  void Set(std::vector<AccessToken> tokens);

  /// Returns the token that `authorization`, the value of the metadata key of that name, has. Its
  /// digest is compared with those of all tokens in the same time. Returns UNAUTHENTICATED if there
  /// is none or it has expired at `now`, and PERMISSION_DENIED if it lacks `scope`.
  absl::StatusOr<std::shared_ptr<const AccessToken>> Check(absl::string_view authorization,
                                                           Scope scope, absl::Time now) const;

  /// Returns the token with this id, or null if it has been removed.
  std::shared_ptr<const AccessToken> Find(absl::string_view id) const;

 private:
  using List = std::vector<std::shared_ptr<const AccessToken>>;

  mutable absl::Mutex mutex_;
  std::shared_ptr<const List> tokens_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd
