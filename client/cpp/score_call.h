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

/// Settings of one score call, in addition to its ScoreArgs.
struct ScoreCallOptions {
  Limits limits;                                 ///< Limits of one request for the head.
  int64_t request_bytes = 0;                     ///< See Client::Options.
  int32_t max_inflight = 1;                      ///< See Client::Options.
  absl::Time deadline = absl::InfiniteFuture();  ///< On the transport's clock.
  absl::Duration timeout;                        ///< Used in messages only.
  LocalTransport* local = nullptr;          ///< Null: rows are in the requests. Outlives the call.
  std::shared_ptr<CallerQueue> queue = {};  ///< Queue of a blocking caller; null if none.
};

/// Splits `args` into requests, keeps up to `max_inflight` of them in flight at each server, and
/// joins the responses. The first error cancels the other requests. `done` is called once, possibly
/// before this returns, and only after the transport has released args.hidden. `args` must have
/// passed CheckScoreArgs.
void StartScoreCall(const CallEnvironment& environment, const ScoreArgs& args,
                    const ScoreCallOptions& options, ScoreCallback done);

}  // namespace logprobd::client
