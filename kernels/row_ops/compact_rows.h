#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/row_ops/row_source.h"

namespace logprobd::kernels {

/// Largest number of upstream gradients per row.
inline constexpr int kRowGradients = 4;

/// Result of LaunchCompactRows. A row is valid when its target is not ignored, and compacted when
/// it is valid and at least one of its gradients is not 0.
struct CompactedRows {
  int64_t num_compacted;
  int64_t num_valid;
  int64_t first_out_of_vocab;  ///< First compacted row with an out-of-vocabulary target, or -1.
  int64_t num_out_of_vocab;    ///< Number of compacted rows with such a target.
  int64_t min_target;          ///< Smallest target of a compacted row; INT64_MAX if there are none.
  int64_t max_target;          ///< Largest target of a compacted row; INT64_MIN if there are none.
  int64_t target_checksum;     ///< Sum of (i + 1) * targets[i] over all rows, modulo 2^64.
};

/// Inputs and outputs of LaunchCompactRows. Pointers point to device memory that the caller owns.
struct CompactRowsParams {
  int64_t num_rows = 0;              ///< 0 to 2^31 - 1.
  const int64_t* targets = nullptr;  ///< [num_rows]
  int64_t ignore_index = 0;          ///< Rows with this target are not valid.
  /// Upstream gradients. If all values are null, every valid row is compacted.
  RowValues gradients[kRowGradients];
  int64_t first_id = 0;            ///< Targets outside [first_id, end_id) are out of vocabulary.
  int64_t end_id = 0;              ///< See first_id.
  int64_t* row_indices = nullptr;  ///< [num_rows]: ascending indices of compacted rows, then zeros.
  /// [num_rows]: for each compacted row the number of valid rows before it, then zeros. Null: not
  /// requested.
  int64_t* valid_indices = nullptr;
  int64_t* num_compacted = nullptr;  ///< Copy of CompactedRows::num_compacted for kernels, or null.
  CompactedRows* result = nullptr;   ///< One struct; may be in pinned host memory.
};

/// Enqueues on `stream` the compaction of the rows that a pass computes and returns without
/// waiting.
///
/// Thread-safe. Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the error
/// of the launch.
[[nodiscard]] cudaError_t LaunchCompactRows(const CompactRowsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
