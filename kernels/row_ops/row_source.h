#pragma once

#include <cstdint>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

/// Where a trainer keeps what is one a row. Pointers are device memory and stay the caller's.
struct RowSource {
  /// [rows that are computed], their places among all rows; null: 0, 1, ...
  const int64_t* row_indices = nullptr;
  const int64_t* targets = nullptr;      ///< [all rows], ids of the whole vocabulary.
  const double* temperatures = nullptr;  ///< [all rows], or null: `temperature`.
  double temperature = 1;
  /// log2(e), and what logits lack (kernels/common/truncation.h): a row's log2_scale is this over
  /// its temperature, rounded once.
  double log2_factor = 0;
  int64_t first_id = 0;     ///< Of the shard.
  int64_t num_columns = 0;  ///< Of the shard.

  LOGPROBD_HOST_DEVICE int64_t RowIndexOf(int64_t row) const {
    return row_indices == nullptr ? row : row_indices[row];
  }
  LOGPROBD_HOST_DEVICE float Log2ScaleAt(int64_t place) const {
    return static_cast<float>(log2_factor /
                              (temperatures == nullptr ? temperature : temperatures[place]));
  }
  /// The target's column in the shard; -1 where the shard does not have it.
  LOGPROBD_HOST_DEVICE int32_t TargetColumnAt(int64_t place) const {
    const int64_t id = targets[place];
    const bool is_here = id >= first_id && id - first_id < num_columns;
    return is_here ? static_cast<int32_t>(id - first_id) : -1;
  }
};

}  // namespace logprobd::kernels
