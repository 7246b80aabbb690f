#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/row_sums.h"

namespace logprobd::kernels {

/// Candidates: listed logits become logprobs in place. Device memory.
struct CandidateScoresParams {
  const int32_t* rows = nullptr;  ///< [count]; row `row_begin` of the batch has normalizers[0].
  int32_t row_begin = 0;
  int32_t row_end = 0;  ///< Pairs of rows outside [row_begin, row_end) are left alone.
  int64_t count = 0;    ///< 0 does nothing.
  const RowNormalizer* normalizers = nullptr;  ///< [row_end - row_begin]
  const float* log2_scales = nullptr;          ///< [row_end - row_begin]
  float* scores = nullptr;                     ///< [count], logits in, logprobs out.
};

/// Top-k: LogitKeys become ids and logprobs. Device memory.
struct TopKScoresParams {
  int64_t num_rows = 0;                        ///< 0 does nothing.
  int32_t top_k = 0;                           ///< >= 1.
  const uint64_t* keys = nullptr;              ///< [num_rows, top_k]
  const RowNormalizer* normalizers = nullptr;  ///< [num_rows]
  const float* log2_scales = nullptr;          ///< [num_rows]
  /// [num_rows, top_k], best first; -1 and NaN in a row that is not finite and where the
  /// vocabulary has fewer than top_k ids.
  int32_t* ids = nullptr;
  float* logprobs = nullptr;  ///< [num_rows, top_k]
};

/// Enqueue on `stream` and return without waiting; thread-safe. cudaErrorInvalidValue when a bound
/// is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchCandidateScores(const CandidateScoresParams& params,
                                                cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchTopKScores(const TopKScoresParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
