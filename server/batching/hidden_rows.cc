#include "server/batching/hidden_rows.h"

#include <algorithm>
#include <cstring>

#include "server/base/errors.h"

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
  if (!hidden.is_pinned) return false;
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
  if (!any_in_place) return;
  bool is_after_staged = false;
  for (const BatchPart& part : parts) {
    num_rows_ += part.num_rows;
    if (!part.is_in_place) {
      // Only staged rows are merged into one run. Clients' memory cannot be copied at once even if
      // it happens to be adjacent.
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
  if (row_begin == 0 && row_end == num_rows_) return runs_;
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

void IndexPieces(PendingRequest& pending) {
  const auto& pieces = pending.request.hidden.pieces;
  pending.piece_offsets.resize(pieces.size() + 1);
  int64_t offset = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    pending.piece_offsets[i] = offset;
    offset += static_cast<int64_t>(pieces[i].size());
  }
  pending.piece_offsets[pieces.size()] = offset;
}

void CopyPayload(const PendingRequest& pending, int64_t offset, int64_t num_bytes,
                 std::byte* destination) {
  const std::vector<int64_t>& offsets = pending.piece_offsets;
  LOGPROBD_CHECK(!offsets.empty() && offset + num_bytes <= offsets.back(), offset, " ", num_bytes);
  // Finds the last piece that begins at or before `offset`; this skips empty pieces.
  auto piece = static_cast<size_t>(std::upper_bound(offsets.begin(), offsets.end() - 1, offset) -
                                   offsets.begin() - 1);
  while (num_bytes > 0) {
    const absl::Span<const std::byte> bytes = pending.request.hidden.pieces[piece];
    const int64_t begin = offset - offsets[piece];
    const int64_t count = std::min(num_bytes, static_cast<int64_t>(bytes.size()) - begin);
    if (count > 0) std::memcpy(destination, bytes.data() + begin, static_cast<size_t>(count));
    destination += count;
    offset += count;
    num_bytes -= count;
    ++piece;
  }
}

void PayloadGather::Gather(absl::Span<const BatchPart> parts, int64_t row_bytes,
                           std::byte* staging) {
  runs_.clear();
  task_begins_.assign(1, 0);
  task_bytes_ = 0;
  int64_t total_bytes = 0;
  for (const BatchPart& part : parts) {
    if (part.is_in_place) continue;
    total_bytes += part.num_rows * row_bytes;
    part.ForEachStretch([&](int64_t row, int64_t batch_row, int64_t num_rows) {
      AddRun(*part.pending, row * row_bytes, batch_row * row_bytes, num_rows * row_bytes);
    });
  }
  task_begins_.push_back(static_cast<int64_t>(runs_.size()));

  const auto copy = [this, staging](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const Run& run = runs_[static_cast<size_t>(i)];
      CopyPayload(*run.pending, run.payload_offset, run.num_bytes, staging + run.staging_offset);
    }
  };
  if (total_bytes < kShareBytes) {
    copy(0, static_cast<int64_t>(runs_.size()));
    return;
  }
  pool_.Run(static_cast<int64_t>(task_begins_.size()) - 1, [&](int64_t task) {
    copy(task_begins_[static_cast<size_t>(task)], task_begins_[static_cast<size_t>(task) + 1]);
  });
}

void PayloadGather::AddRun(const PendingRequest& pending, int64_t payload_offset,
                           int64_t staging_offset, int64_t num_bytes) {
  while (num_bytes > 0) {
    if (task_bytes_ >= kTaskBytes) {
      task_begins_.push_back(static_cast<int64_t>(runs_.size()));
      task_bytes_ = 0;
    }
    const int64_t count = std::min(num_bytes, kTaskBytes);
    runs_.push_back(Run{&pending, payload_offset, staging_offset, count});
    task_bytes_ += count;
    payload_offset += count;
    staging_offset += count;
    num_bytes -= count;
  }
}

}  // namespace logprobd
