#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "server/base/scoring_engine.h"
#include "server/batching/pending_request.h"

namespace logprobd {

/// Where an engine that reads in place finds the rows of a batch.
///
/// Rows in pinned shared memory are read there if they come in stretches of kRunBytes and more on
/// average; shorter ones are gathered like those of messages, since a copy to a GPU takes
/// microseconds however short it is. Rows in a GPU's memory are always read there: a run for each
/// stretch, at most one a row. Memory is kept from batch to batch.
class HiddenRuns {
 public:
  static constexpr int64_t kRunBytes = int64_t{64} << 10;

  /// All rows are staged.
  void Clear() { runs_.clear(); }

  /// Decides for each part of a batch and sets its `is_in_place`. The others are to be gathered
  /// into `staging`, at their batch_row.
  void Place(absl::Span<BatchPart> parts, int64_t row_bytes, const std::byte* staging);

  /// Nothing is read in place: the rows lie in the staging buffer, in their order.
  bool empty() const { return runs_.empty(); }

  /// The runs of rows [row_begin, row_end) of the batch, valid until the next call; none if
  /// empty().
  absl::Span<const HiddenRun> Of(int64_t row_begin, int64_t row_end);

 private:
  int64_t row_bytes_ = 0;
  int64_t num_rows_ = 0;
  std::vector<HiddenRun> runs_;
  std::vector<HiddenRun> part_of_runs_;
};

}  // namespace logprobd
