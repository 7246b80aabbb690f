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

/// Names a submitted request so that it can be cancelled.
using RequestTicket = uint64_t;

struct VerifyOptions {
  int32_t rows = 8;  ///< 1 to 64.
  uint64_t seed = 1;
  /// Ends the Verify soon (CANCELLED) once it is set, by the caller or by the head. Null: the
  /// head's.
  std::shared_ptr<std::atomic<bool>> stop = nullptr;
  absl::Time deadline = absl::InfiniteFuture();  ///< Of scoring the probe, on the server's Clock.
};

/// Largest differences between the engine's scores and double precision on a seeded probe.
struct VerifyReport {
  bool passed = false;
  int32_t rows = 0;
  uint64_t weights_version = 0;  ///< That was verified.
  double logprob_difference_max = 0;
  double entropy_difference_max = 0;
  double logprob_tolerance = 0;
  double entropy_tolerance = 0;
  double logit_stddev = 0;
  double seconds = 0;
};

using VerifyCallback = absl::AnyInvocable<void(absl::StatusOr<VerifyReport>) &&>;

/// A head as the transport sees it: facts, a way in, a way out. Thread-safe.
class ServedHead {
 public:
  virtual ~ServedHead() = default;

  /// Those of the live weights; a swap of weights replaces them, so hold on to what is returned.
  virtual std::shared_ptr<const HeadInfo> info() const = 0;

  /// Whether requests can be scored now (weights loaded, an engine healthy, not draining).
  virtual bool ready() const = 0;

  /// Queues a validated request; never blocks and copies no payload. On error `done` is dropped
  /// uncalled; else it is called once. Errors carry their reason (rejection.h):
  /// * RESOURCE_EXHAUSTED: the queue or the client's share is full; with a retry hint (errors.h).
  /// * DEADLINE_EXCEEDED: the deadline has passed or cannot be met.
  /// * UNAVAILABLE: not ready, or shutting down.
  virtual absl::StatusOr<RequestTicket> Submit(ScoreRequest request, ScoreCallback done) = 0;

  /// Drops what of the request has not been launched; its callback gets CANCELLED soon, or
  /// DEADLINE_EXCEEDED when its deadline is due (IsDue). Unknown or finished tickets are ignored.
  virtual void Cancel(RequestTicket ticket) = 0;

  /// Scores a probe and compares it with double precision, on a thread of its own; one at a time
  /// (RESOURCE_EXHAUSTED otherwise). Reads the whole weight: tens of seconds for a large head.
  virtual void Verify(const VerifyOptions& options, VerifyCallback done) = 0;
};

/// The heads by name. Thread-safe.
class HeadRegistry {
 public:
  virtual ~HeadRegistry() = default;

  /// An empty name finds the only head (INVALID_ARGUMENT if there are several). NOT_FOUND lists the
  /// names; UNAVAILABLE while nothing is loaded.
  virtual absl::StatusOr<std::shared_ptr<ServedHead>> Find(absl::string_view name) const = 0;

  virtual std::vector<std::shared_ptr<ServedHead>> List() const = 0;
};

}  // namespace logprobd
