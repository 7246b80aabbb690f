#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_ops/row_values.h"

namespace logprobd::kernels {

inline constexpr int kRowGradients = 4;

/// What LaunchCompactRows found.
struct CompactedRows {
  int64_t num_selected;
  int64_t num_valid;           ///< Rows that are not ignored, whatever their gradients.
  int64_t first_out_of_vocab;  ///< The first selected row whose target is not among the ids; or -1.
  int64_t num_out_of_vocab;
  int64_t least_target;  ///< Of the selected rows; INT64_MAX and INT64_MIN of none.
  int64_t greatest_target;
  int64_t target_checksum;  ///< The sum of (i + 1) targets[i] over all rows, modulo 2^64.
};

/// Inputs and outputs of LaunchCompactRows. Pointers are device memory and stay the caller's.
struct CompactRowsParams {
  int64_t num_rows = 0;              ///< 0 to 2^31 - 1.
  const int64_t* targets = nullptr;  ///< [num_rows]
  int64_t ignore_index = 0;          ///< Rows with this target are not selected.
  /// Where any is given: rows in which all are 0 are not selected.
  RowValues gradients[kRowGradients];
  int64_t first_id = 0;  ///< Ids [first_id, end_id) are owned.
  int64_t end_id = 0;
  int64_t* index = nullptr;  ///< [num_rows]: the selected rows, rising; behind them 0.
  /// [num_rows], or null: of the selected rows, how many before each are not ignored; behind them
  /// 0.
  int64_t* valid_indices = nullptr;
  int64_t* num_selected = nullptr;    ///< Or null: CompactedRows's once more, for kernels.
  CompactedRows* selected = nullptr;  ///< One; may be pinned memory of the host.
};

/// Enqueues the search for the rows that are to be computed on `stream` and returns without
/// waiting. Thread-safe. Returns cudaErrorInvalidValue when a bound is broken, else the launch's
/// own error.
[[nodiscard]] cudaError_t LaunchCompactRows(const CompactRowsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
