#include "server/batching/payload_gather.h"

#include <algorithm>
#include <cstring>

#include "server/base/errors.h"

namespace logprobd {

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
  // The last piece that begins at or before `offset`; empty pieces are passed over.
  auto piece = static_cast<size_t>(std::upper_bound(offsets.begin(), offsets.end() - 1, offset) -
                                   offsets.begin() - 1);
  while (num_bytes > 0) {
    const absl::Span<const std::byte> bytes = pending.request.hidden.pieces[piece];
    const int64_t begin = offset - offsets[piece];
    const int64_t count = std::min(num_bytes, static_cast<int64_t>(bytes.size()) - begin);
    if (count > 0) {
      std::memcpy(destination, bytes.data() + begin, static_cast<size_t>(count));
    }
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
    if (part.is_in_place) {
      continue;
    }
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
