#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/caller_queue.h"
#include "client/cpp/client.h"
#include "client/cpp/local_transport.h"
#include "client/cpp/retrying_call.h"
#include "client/cpp/score.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// What a ScoreCall needs beside its arguments.
struct ScoreCallOptions {
  Limits limits;
  int64_t request_bytes = 0;
  int32_t max_inflight = 1;
  absl::Time deadline = absl::InfiniteFuture();  ///< On the transport's clock.
  absl::Duration timeout;                        ///< For messages.
  LocalTransport* local = nullptr;          ///< Null: rows travel in requests. Outlives the call.
  std::shared_ptr<CallerQueue> queue = {};  ///< Of a caller that waits; else null.
};

/// Cuts `args` into requests, keeps up to `max_inflight` of them in flight, and joins the answers.
/// The first error cancels the rest. `done` is called once, perhaps before this returns, and never
/// before the transport has let go of args.hidden. `args` has been checked.
void StartScoreCall(const CallEnvironment& environment, const ScoreArgs& args,
                    const ScoreCallOptions& options, ScoreCallback done);

}  // namespace logprobd::client
