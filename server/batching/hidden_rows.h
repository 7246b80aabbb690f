#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/base/scoring_engine.h"
#include "server/batching/pending_request.h"
#include "server/batching/task_pool.h"

namespace logprobd {

/// Decides which rows of a batch the engine reads in place, and lists the runs of rows in memory
/// from which it reads the batch. All other rows are gathered into the staging buffer
/// (PayloadGather).
///
/// Rows in pinned shared memory are read in place if their runs have at least kRunBytes on average.
/// Shorter runs are gathered like rows of messages, because each copy to a GPU takes microseconds
/// however short it is. Rows in a GPU's memory are always read in place, with at most one run per
/// row. The lists keep their memory between batches.
class HiddenRuns {
 public:
  static constexpr int64_t kRunBytes = int64_t{64} << 10;

  /// Removes all runs, which means that the whole batch is staged.
  void Clear() { runs_.clear(); }

  /// Sets `is_in_place` of each part and builds the runs. The caller gathers the other parts into
  /// `staging`, each at its batch_row.
  void Place(absl::Span<BatchPart> parts, int64_t row_bytes, const std::byte* staging);

  /// Returns true if nothing is read in place: all rows are in the staging buffer, in order.
  bool empty() const { return runs_.empty(); }

  /// Returns the runs of rows [row_begin, row_end) of the batch, valid until the next call. There
  /// are none if empty().
  absl::Span<const HiddenRun> Of(int64_t row_begin, int64_t row_end);

 private:
  int64_t row_bytes_ = 0;
  int64_t num_rows_ = 0;
  std::vector<HiddenRun> runs_;
  std::vector<HiddenRun> part_of_runs_;
};

/// Copies the hidden rows of a batch's parts into staging memory, except ignored rows and parts
/// that are read in place. The pieces of a payload may have any size and alignment; a row may span
/// several of them.
///
/// The calling thread alone copies fewer than kShareBytes, because waking other threads takes
/// longer.
class PayloadGather {
 public:
  static constexpr int64_t kShareBytes = int64_t{512} << 10;
  static constexpr int64_t kTaskBytes = int64_t{256} << 10;

  explicit PayloadGather(TaskPool& pool) : pool_(pool) {}

  /// Copies the rows of `parts` to `staging`, which must have room for all of them, `row_bytes`
  /// each, at their batch_row. IndexPieces must have been called for each part's request.
  void Gather(absl::Span<const BatchPart> parts, int64_t row_bytes, std::byte* staging);

 private:
  /// Consecutive bytes of one payload, at most kTaskBytes.
  struct Run {
    const PendingRequest* pending;
    int64_t payload_offset;
    int64_t staging_offset;
    int64_t num_bytes;
  };

  void AddRun(const PendingRequest& pending, int64_t payload_offset, int64_t staging_offset,
              int64_t num_bytes);

  TaskPool& pool_;
  std::vector<Run> runs_;  // The vectors keep their memory between batches.
  std::vector<int64_t> task_begins_;
  int64_t task_bytes_ = 0;
};

/// Fills pending.piece_offsets.
void IndexPieces(PendingRequest& pending);

/// Copies bytes [offset, offset + num_bytes) of the payload to `destination`.
void CopyPayload(const PendingRequest& pending, int64_t offset, int64_t num_bytes,
                 std::byte* destination);

}  // namespace logprobd
