#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/base/outputs.h"
#include "server/metrics/metrics.h"
#include "server/transport/answer_budget.h"

namespace logprobd {

/// The answer to one ScoreRequest: a result, or a status that is not OK.
struct ScoreReply {
  absl::Status status;
  std::string request_id;
  uint64_t chunk_id = 0;
  Metrics::Transport transport = Metrics::Transport::kTcp;  ///< Of the request's rows.
  ScoreResult result;
  AnswerBudget::Hold hold;  ///< Of the result: to be kept until it has been sent.
};

/// `reply` as a serialised proto ScoreResponse. Large arrays are not copied: they move into slices
/// of the message.
grpc::ByteBuffer EncodeScoreReply(ScoreReply reply);

}  // namespace logprobd
