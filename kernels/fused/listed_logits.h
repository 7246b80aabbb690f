#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/fused/choice.h"
#include "kernels/fused/params.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchListedLogits. Pointers point to device memory that the caller owns.
struct ListedLogitsParams {
  /// Rows, weight, vocabulary, bias and transform, as LaunchFusedPartials takes them; the other
  /// fields are not read. row_count must be null.
  FusedPartialsParams partials;
  const int32_t* rows =
      nullptr;  ///< [count], rows of the batch; null: pair i is row i of `partials`.
  const int32_t* ids = nullptr;  ///< [count], ids in the whole vocabulary.
  int32_t row_begin = 0;    ///< Row of the batch that is row 0 of `partials`; 0 without `rows`.
  int64_t count = 0;        ///< 0 to 2^31 - 1; 0 does nothing.
  float* logits = nullptr;  ///< [count]; written where `partials` contain the row and the id.
};

/// Enqueues the logits of listed (row, id) pairs on `stream` and returns without waiting. They are
/// bit-identical to the logits of the fused kernel.
///
/// Thread-safe. Returns cudaErrorNotSupported below compute capability 8.0, cudaErrorInvalidValue
/// if a parameter is out of range, otherwise the error of the launch.
[[nodiscard]] cudaError_t LaunchListedLogits(const ListedLogitsParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
