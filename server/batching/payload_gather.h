#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/batching/pending_request.h"
#include "server/batching/task_pool.h"

namespace logprobd {

/// Copies the hidden rows of a batch's parts into staging memory, without the ignored ones and
/// without the parts that are read in place. Pieces of a payload may have any size and alignment: a
/// row may span several.
///
/// Below kShareBytes the calling thread copies alone: waking others takes longer.
class PayloadGather {
 public:
  static constexpr int64_t kShareBytes = int64_t{512} << 10;
  static constexpr int64_t kTaskBytes = int64_t{256} << 10;

  explicit PayloadGather(TaskPool& pool) : pool_(pool) {}

  /// `staging` has room for all rows of `parts` of `row_bytes` each, at their batch_row. Every
  /// part's request has its piece_offsets.
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
  std::vector<Run> runs_;  // kept to reuse their memory
  std::vector<int64_t> task_begins_;
  int64_t task_bytes_ = 0;
};

/// Fills pending.piece_offsets.
void IndexPieces(PendingRequest& pending);

/// Copies bytes [offset, offset + num_bytes) of the payload to `destination`.
void CopyPayload(const PendingRequest& pending, int64_t offset, int64_t num_bytes,
                 std::byte* destination);

}  // namespace logprobd
