#pragma once

#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/common/logit_scale.h"

namespace logprobd::kernels {

/// One number per row, in device memory that the caller owns. A broadcast scalar has stride 0.
struct RowValues {
  const float* values = nullptr;  ///< Null: every row has the value 0.
  int64_t stride = 1;             ///< Elements from one row to the next.
};

/// Per-row inputs as a trainer stores them, and the rows that are computed. Pointers point to
/// device memory that the caller owns. A "row index" counts all rows; a "row" counts the computed
/// ones.
struct RowSource {
  /// [computed rows]: row index of each computed row; null: row i has the row index i.
  const int64_t* row_indices = nullptr;
  const int64_t* targets = nullptr;     ///< [all rows], ids in the whole vocabulary.
  const float* temperatures = nullptr;  ///< [all rows]; null: every row has `temperature`.
  float temperature = 1;
  double correction = 1;    ///< CorrectedTransform::correction of the head.
  int64_t first_id = 0;     ///< Vocabulary id of the shard's first column.
  int64_t num_columns = 0;  ///< Columns of the shard.

  LOGPROBD_HOST_DEVICE int64_t RowIndexOf(int64_t row) const {
    return row_indices == nullptr ? row : row_indices[row];
  }
  LOGPROBD_HOST_DEVICE float Log2ScaleAt(int64_t row_index) const {
    return CorrectedLog2Scale(temperatures == nullptr ? temperature : temperatures[row_index],
                              correction);
  }
  /// Returns the target's column in the shard, or -1 when another shard holds the target.
  LOGPROBD_HOST_DEVICE int32_t TargetColumnAt(int64_t row_index) const {
    const int64_t id = targets[row_index];
    const bool is_here = id >= first_id && id - first_id < num_columns;
    return is_here ? static_cast<int32_t>(id - first_id) : -1;
  }
};

}  // namespace logprobd::kernels
