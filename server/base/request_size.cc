#include "server/base/request_size.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace logprobd {
namespace {

/// A piece's span, offset and gRPC slice. A client chooses the pieces, down to a byte each.
constexpr int64_t kPieceBytes = 56;

template <typename T>
int64_t Bytes(const std::vector<T>& values) {
  return static_cast<int64_t>(values.size() * sizeof(T));
}

}  // namespace

int64_t PayloadBytes(const ScoreRequest& request) {
  const HiddenPayload& hidden = request.hidden;
  const int64_t message_bytes =
      hidden.place == PayloadPlace::kMessage ? std::max(request.message_bytes, hidden.bytes) : 0;
  return message_bytes + kPieceBytes * static_cast<int64_t>(hidden.pieces.size());
}

int64_t FieldBytes(const ScoreRequest& request) {
  return Bytes(request.targets) + Bytes(request.row_temperatures) + Bytes(request.candidate_ids) +
         Bytes(request.candidate_offsets) + Bytes(request.segment_offsets);
}

int64_t AnswerBytes(const ScoreRequest& request) {
  OutputSet outputs = request.outputs();
  if (!request.segment_offsets.empty()) {
    outputs = outputs.With(Output::kLogprob).With(Output::kGreedy);
  }
  int64_t row_bytes = 8 * request.top_k;
  const auto add = [&](Output output, int64_t bytes) {
    row_bytes += outputs.Has(output) ? bytes : 0;
  };
  add(Output::kLogprob, 4);
  add(Output::kEntropy, 4);
  add(Output::kLse, 4);
  add(Output::kArgmax, 8);
  add(Output::kGreedy, 1);
  add(Output::kSumPSquared, 4);
  add(Output::kMaxLogit, 4);
  add(Output::kMinLogit, 4);
  constexpr int64_t kSegmentBytes = 8 + 4 + 1;
  return request.rows * row_bytes + 4 * static_cast<int64_t>(request.candidate_ids.size()) +
         kSegmentBytes * request.num_segments();
}

}  // namespace logprobd
