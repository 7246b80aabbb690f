#include "server/batching/hidden_runs.h"

#include <algorithm>

namespace logprobd {
namespace {

bool IsReadInPlace(const BatchPart& part, int64_t row_bytes) {
  const HiddenPayload& hidden = part.pending->request.hidden;
  switch (hidden.place) {
    case PayloadPlace::kMessage:
      return false;
    case PayloadPlace::kDevice:
      return true;
    case PayloadPlace::kSharedMemory:
      break;
  }
  if (!hidden.is_pinned) {
    return false;
  }
  int64_t num_runs = 0;
  part.ForEachStretch([&num_runs](int64_t, int64_t, int64_t) { ++num_runs; });
  return part.num_rows * row_bytes >= num_runs * HiddenRuns::kRunBytes;
}

}  // namespace

void HiddenRuns::Place(absl::Span<BatchPart> parts, int64_t row_bytes, const std::byte* staging) {
  runs_.clear();
  row_bytes_ = row_bytes;
  num_rows_ = 0;
  bool any_in_place = false;
  for (BatchPart& part : parts) {
    part.is_in_place = IsReadInPlace(part, row_bytes);
    any_in_place = any_in_place || part.is_in_place;
  }
  if (!any_in_place) {
    return;
  }
  bool is_after_staged = false;
  for (const BatchPart& part : parts) {
    num_rows_ += part.num_rows;
    if (!part.is_in_place) {
      // Only staged rows are joined: memory of clients that happens to be adjacent is none to copy
      // at once.
      if (is_after_staged) {
        runs_.back().num_rows += part.num_rows;
      } else {
        runs_.push_back(
            HiddenRun{.data = staging + part.batch_row * row_bytes, .num_rows = part.num_rows});
      }
      is_after_staged = true;
      continue;
    }
    is_after_staged = false;
    const HiddenPayload& hidden = part.pending->request.hidden;
    part.ForEachStretch([&](int64_t row, int64_t, int64_t num_rows) {
      runs_.push_back(HiddenRun{.data = hidden.pieces.front().data() + row * row_bytes,
                                .num_rows = num_rows,
                                .gpu = hidden.gpu});
    });
  }
}

absl::Span<const HiddenRun> HiddenRuns::Of(int64_t row_begin, int64_t row_end) {
  if (row_begin == 0 && row_end == num_rows_) {
    return runs_;
  }
  part_of_runs_.clear();
  int64_t run_begin = 0;
  for (const HiddenRun& run : runs_) {
    const int64_t begin = std::max(run_begin, row_begin);
    const int64_t end = std::min(run_begin + run.num_rows, row_end);
    if (begin < end) {
      part_of_runs_.push_back(HiddenRun{.data = run.data + (begin - run_begin) * row_bytes_,
                                        .num_rows = end - begin,
                                        .gpu = run.gpu});
    }
    run_begin += run.num_rows;
  }
  return part_of_runs_;
}

}  // namespace logprobd
