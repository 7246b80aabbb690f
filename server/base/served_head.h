#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/base/head_info.h"
#include "server/base/outputs.h"
#include "server/base/score_request.h"

namespace logprobd {

/// Identifies a submitted request, so that it can be cancelled.
using RequestTicket = uint64_t;

struct VerifyOptions {
  int32_t rows = 8;  ///< Number of rows, 1 to 64.
  uint64_t seed = 1;
  /// Once the caller or the head sets it to true, Verify soon ends with CANCELLED. If it is null,
  /// only the head can stop Verify.
  std::shared_ptr<std::atomic<bool>> stop = nullptr;
  /// Deadline for scoring the probe, as a time of the server's Clock.
  absl::Time deadline = absl::InfiniteFuture();
};

/// Largest differences between the engine's scores and scores in double precision on a seeded
/// probe, in nats.
struct VerifyReport {
  bool passed = false;
  int32_t rows = 0;
  uint64_t weights_version = 0;  ///< Version of the weights that was verified.
  double logprob_difference_max = 0;
  double entropy_difference_max = 0;
  double logprob_tolerance = 0;
  double entropy_tolerance = 0;
  double logit_stddev = 0;
  double seconds = 0;
};

using VerifyCallback = absl::AnyInvocable<void(absl::StatusOr<VerifyReport>) &&>;

/// A head as the transport sees it: its description, and calls to submit and cancel requests.
/// Thread-safe.
class ServedHead {
 public:
  virtual ~ServedHead() = default;

  /// Returns the info of the live weights. A change of weights replaces it, so callers must keep
  /// the returned pointer for as long as they use the info.
  virtual std::shared_ptr<const HeadInfo> info() const = 0;

  /// Returns whether requests can be scored now: the weights are loaded, an engine is healthy and
  /// the head is not draining.
  virtual bool ready() const = 0;

  /// Queues a validated request. Submit never blocks and copies no payload. If it returns an error,
  /// `done` is destroyed without being called; otherwise `done` is called once. Returns these
  /// errors, which carry a reason (RejectionOf):
  ///   - RESOURCE_EXHAUSTED: the queue or the client's share is full; the error carries a retry
  ///     hint (errors.h).
  ///   - DEADLINE_EXCEEDED: the deadline has passed or cannot be met.
  ///   - UNAVAILABLE: the head is not ready or is shutting down.
  virtual absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done) = 0;

  /// Drops the rows of a request that have not been launched. Its callback soon receives CANCELLED,
  /// or DEADLINE_EXCEEDED if its deadline is due (LateIfDue). Unknown or finished tickets are
  /// ignored.
  virtual void Cancel(RequestTicket ticket) = 0;

  /// Scores a probe and compares the scores with double precision on a separate thread. Only one
  /// Verify runs at a time; another one fails with RESOURCE_EXHAUSTED. Verify reads the whole
  /// weight, which takes tens of seconds for a large head.
  virtual void Verify(const VerifyOptions& options, VerifyCallback done) = 0;
};

/// Finds heads by name. Thread-safe.
class HeadRegistry {
 public:
  virtual ~HeadRegistry() = default;

  /// Returns the head with that name; an empty name means the only head. Returns INVALID_ARGUMENT
  /// if the name is empty and there are several heads, NOT_FOUND with a list of the names if the
  /// name is unknown, and UNAVAILABLE while the head is being loaded.
  virtual absl::StatusOr<std::shared_ptr<ServedHead>> Find(absl::string_view name) const = 0;

  virtual std::vector<std::shared_ptr<ServedHead>> List() const = 0;
};

}  // namespace logprobd
