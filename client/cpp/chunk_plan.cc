#include "client/cpp/chunk_plan.h"

#include <algorithm>
#include <cstddef>

namespace logprobd::client {
namespace {

// Bytes reserved in a message for names, scalar fields, tags and lengths.
constexpr int64_t kFixedBytes = 1024;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Returns the rows per chunk, <= rows_max, that make chunks about equal: the server treats a short
/// last request as latency-sensitive and forms smaller batches for it.
int64_t EvenRows(int64_t rows, int64_t rows_max) {
  return rows == 0 ? rows_max : DivideUp(rows, DivideUp(rows, rows_max));
}

}  // namespace

ChunkPlan PlanChunks(const ScoreArgs& args, const Limits& limits, int64_t request_bytes) {
  const bool has_candidates = !args.candidate_offsets.empty();
  const int64_t hidden_bytes = std::max<int64_t>(1, args.hidden_size * DtypeBytes(args.dtype));
  const int64_t row_bytes = hidden_bytes + 4 +                         // target
                            (args.row_temperatures.empty() ? 0 : 4) +  // temperature
                            (has_candidates ? 4 : 0);                  // offset
  const int64_t message_bytes = std::max<int64_t>(1, limits.message_bytes_max - kFixedBytes);
  const int64_t segments =
      std::max<int64_t>(0, static_cast<int64_t>(args.segment_offsets.size()) - 1);

  // This is the average over all rows: lists of very different lengths may still leave a short last
  // chunk.
  const int64_t list_bytes = 4 * DivideUp(static_cast<int64_t>(args.candidate_ids.size()),
                                          std::max<int64_t>(1, args.rows));
  const int64_t rows_max = EvenRows(
      args.rows, std::max<int64_t>(1, std::min({int64_t{limits.request_rows_max},
                                                request_bytes / (hidden_bytes + list_bytes),
                                                message_bytes / (row_bytes + list_bytes)})));

  ChunkPlan plan;
  Chunk chunk;
  // Segments are sent only in the first chunk, and only if the call is not split.
  int64_t segment_bytes = segments * 4;
  for (int64_t row = 0; row < args.rows; ++row) {
    const auto index = static_cast<size_t>(row);
    const int64_t candidates_end = has_candidates ? args.candidate_offsets[index + 1] : 0;
    // The size of the chunk if it includes this row.
    const int64_t rows = chunk.rows() + 1;
    const int64_t candidates = candidates_end - chunk.candidate_begin;
    const bool full =
        rows > rows_max || segment_bytes + rows * row_bytes + 4 * candidates > message_bytes ||
        rows * hidden_bytes + 4 * candidates > request_bytes || candidates > limits.candidates_max;
    if (full && chunk.rows() > 0) {
      plan.chunks.push_back(chunk);
      chunk = {.row_begin = row,
               .row_end = row,
               .candidate_begin = chunk.candidate_end,
               .candidate_end = chunk.candidate_end};
      segment_bytes = 0;
    }
    chunk.row_end = row + 1;
    chunk.candidate_end = candidates_end;
  }
  plan.chunks.push_back(chunk);
  plan.sum_segments_in_client =
      segments > 0 && (plan.chunks.size() > 1 || segments > limits.segments_max);
  return plan;
}

}  // namespace logprobd::client
