#include "server/base/score_request.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace logprobd {
namespace {

/// Bytes of memory for the span, the offset and the gRPC slice of a piece. A client chooses the
/// pieces, which can be as small as one byte.
constexpr int64_t kPieceBytes = 56;

template <typename T>
int64_t Bytes(const std::vector<T>& values) {
  return static_cast<int64_t>(values.size() * sizeof(T));
}

}  // namespace

absl::Status LateIfDue(absl::Status status, absl::Time deadline, absl::Time now,
                       absl::string_view late) {
  const bool is_due = now + kDeadlineSlack >= deadline;
  return absl::IsCancelled(status) && is_due ? absl::DeadlineExceededError(late)
                                             : std::move(status);
}

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
  return ColumnBytes(request.computed_outputs(), request.column_counts());
}

}  // namespace logprobd
