// RowScoresKernel: combines the partials of a row into its scores.
//
// Idea      First find the row's largest exponent over its tiles. Then rebase every sum to it,
//           quantise it once and add it as a 64-bit integer: integer addition is associative, so
//           the grouping over threads does not affect the bits.
// Work      See row_scores.cuh.
// Traffic   Reads 16 bytes per tile, in whole sectors (PartialLayoutOf). The partials stay in
//           registers between both steps, unless a row has so many tiles that they are read again.
// Numerics  Each partial is rounded to 2^-42 relative to the row's exponent; sums are exact; the rest
//           is fp64.
// Limits    V <= 2^20 (row_sums.h).
// Source    Our own; see kernels/common/row_sums.h.

#include <cstdint>

#include "kernels/combine/row_scores.cuh"
#include "kernels/combine/row_scores.h"

namespace logprobd::kernels {
namespace {

using internal::kJoinThreads;

template <int kRows>
__device__ RowSums JoinTiles(const TileSums* sums, const RowScoresParams& params,
                             int64_t* scratch) {
  // Enough for 786,432 columns with one row per block, and for 196,608 with four.
  constexpr int kHeldTiles = 16;
  const internal::TilesOfRow tiles = {sums, params.layout.tile_stride, params.num_tiles};
  if (params.num_tiles <= kHeldTiles * (kJoinThreads / kRows)) {
    return internal::SumHeldTiles<kRows, kHeldTiles>(tiles, params.sum_p_squared != nullptr,
                                                     scratch);
  }
  const int32_t exponent = internal::LargestExponent<kRows>(tiles, scratch);
  return internal::SumTiles<kRows>(tiles, exponent, params.sum_p_squared != nullptr, scratch);
}

template <int kRows>
__global__ void __launch_bounds__(kJoinThreads) RowScoresKernel(const RowScoresParams params) {
  __shared__ int64_t scratch[internal::kJoinWarps * kRows];
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();  // returns at once unless follows_partials is set
#endif
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x % kRows;
  const int64_t some_row = row < params.num_rows ? row : params.num_rows - 1;
  internal::JoinedSums joined;
  joined.sums = JoinTiles<kRows>(params.sums + params.layout.At(some_row, 0), params, scratch);
  joined.entropy_sums = joined.sums;
  joined.has_entropy_sums = params.entropy != nullptr && params.entropy_sums != nullptr;
  if (joined.has_entropy_sums) {
    joined.entropy_sums =
        JoinTiles<kRows>(params.entropy_sums + params.layout.At(some_row, 0), params, scratch);
  }
  if (threadIdx.x >= kRows || row >= params.num_rows) return;
  internal::WriteScores(params, row, joined);
}

/// Returns true if the code that the current device runs waits for the launch before it. Otherwise
/// the kernel must not start early: the device has compute capability below 9.0, or this build has
/// only code for such devices.
template <int kRows>
bool WaitsForPartials() {
  constexpr int kHopper = 90;
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, RowScoresKernel<kRows>) == cudaSuccess &&
         attributes.ptxVersion >= kHopper;
}

template <int kRows>
cudaError_t Launch(const RowScoresParams& params, cudaStream_t stream) {
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<uint32_t>((params.num_rows + kRows - 1) / kRows);
  config.blockDim = kJoinThreads;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = params.follows_partials && WaitsForPartials<kRows>() ? 1 : 0;
  return cudaLaunchKernelEx(&config, RowScoresKernel<kRows>, params);
}

}  // namespace

cudaError_t LaunchRowScores(const RowScoresParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (!internal::HasValidOutputs(params) || params.num_tiles < 1 ||
      params.num_tiles > NumTiles(params.vocab_size) || params.layout.row_stride < 1 ||
      params.layout.tile_stride < 1 || params.sums == nullptr) {
    return cudaErrorInvalidValue;
  }
  return params.num_rows <= kRowMajorRowsMax
             ? Launch<1>(params, stream)
             : Launch<internal::kJoinRowsOfLargeBatch>(params, stream);
}

}  // namespace logprobd::kernels
