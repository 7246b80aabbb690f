#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/fused_sm90/fused_partials.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchListedLogits. Pointers are device memory and stay the caller's.
struct ListedLogitsParams {
  /// As LaunchFusedPartials takes it: rows, weight, vocabulary, bias and transform are used. The
  /// rows are known: no row_count.
  FusedPartialsParams partials;
  const int32_t* rows = nullptr;  ///< [count]; row `row_begin` of the batch is the first of these.
  const int32_t* ids = nullptr;   ///< [count], ids in the whole vocabulary.
  int32_t row_begin = 0;
  int64_t count = 0;        ///< 0 to 2^31 - 1; 0 does nothing.
  float* logits = nullptr;  ///< [count]; written where these rows and tiles hold row and id.
};

/// Enqueues the logits of listed (row, id) pairs on `stream` and returns without waiting: the bits
/// that the fused kernel has for them. Thread-safe. Returns cudaErrorInvalidValue when a bound is
/// broken, cudaErrorNotSupported in a build without CUTLASS, else the launch's own error.
[[nodiscard]] cudaError_t LaunchListedLogits(const ListedLogitsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
