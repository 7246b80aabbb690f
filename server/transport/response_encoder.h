#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/base/outputs.h"
#include "server/metrics/metrics.h"
#include "server/transport/answer_budget.h"

namespace logprobd {

/// The reply to one ScoreRequest: a result, or a status that is not OK.
struct ScoreReply {
  absl::Status status;
  std::string request_id;
  uint64_t chunk_id = 0;
  Metrics::Transport transport =
      Metrics::Transport::kTcp;  ///< The way in which the rows of the request arrived.
  ScoreResult result;
  AnswerBudget::Hold hold;  ///< Budget of the result; it is kept until the result is sent.
};

/// Serialises `reply` as a proto ScoreResponse. Large arrays are not copied but moved into slices
/// of the message.
grpc::ByteBuffer EncodeScoreReply(ScoreReply reply);

}  // namespace logprobd
