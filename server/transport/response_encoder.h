#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/base/outputs.h"
#include "server/base/trace_context.h"
#include "server/metrics/metrics.h"
#include "server/transport/answer_budget.h"

namespace logprobd {

/// What a proto Trace has beside ScoreResult::times.
struct ReplyTrace {
  TraceContext context;
  absl::Time received;       ///< Time of the server's Clock, like ScoreResult::times.
  absl::Time received_wall;  ///< The same moment on the wall clock.
  absl::Time replied;        ///< Time of the server's Clock.
};

/// The reply to one ScoreRequest: a result, or a status that is not OK.
struct ScoreReply {
  absl::Status status;
  std::string request_id;
  uint64_t chunk_id = 0;
  Metrics::Transport transport =
      Metrics::Transport::kTcp;  ///< The way in which the rows of the request arrived.
  ScoreResult result;
  std::optional<ReplyTrace> trace;  ///< Present if the request has `trace` and a result.
  AnswerBudget::Hold hold;          ///< Budget of the result; it is kept until the result is sent.
};

/// Serialises `reply` as a proto ScoreResponse. Large arrays are not copied but moved into slices
/// of the message.
grpc::ByteBuffer EncodeScoreReply(ScoreReply reply);

}  // namespace logprobd
