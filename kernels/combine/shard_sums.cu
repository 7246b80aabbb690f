// ShardExponentsKernel, ShardSumsKernel, ShardScoresKernel: RowScoresKernel in three steps, for
// tiles that are distributed over shards.
//
// Idea      Between the steps the shards exchange integers, whose maximum and sum do not depend on
//           the grouping of tiles: 4 bytes per row, then 8 bytes per row and field.
// Work      The first two steps work as row_scores.cuh describes, with one set of partials per
//           grid.y. The last step uses one thread per row.
// Traffic   Reads 16 bytes per tile in each of the first two steps; the second mostly hits a cache.
// Numerics  Bit-identical to RowScoresKernel.
// Limits    At most 2^20 columns over all shards (row_sums.h).
// Source    Our own; see kernels/common/row_sums.h.

#include <cstdint>

#include "kernels/combine/row_scores.cuh"
#include "kernels/combine/shard_sums.h"

namespace logprobd::kernels {
namespace {

using internal::kJoinThreads;

constexpr int kScoresThreads = 128;

/// Returns the tiles of a row in the block's set of partials.
__device__ __forceinline__ internal::TilesOfRow TilesOf(const ShardSumsParams& params,
                                                        int64_t row) {
  const TileSums* const sums = blockIdx.y == 0 ? params.sums : params.entropy_sums;
  return {sums + params.layout.At(row, 0), params.layout.tile_stride, params.num_tiles};
}

template <int kRows>
__global__ void __launch_bounds__(kJoinThreads) ShardExponentsKernel(const ShardSumsParams params) {
  __shared__ int64_t scratch[internal::kJoinScratch<kRows>];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x % kRows;
  const int64_t some_row = row < params.num_rows ? row : params.num_rows - 1;
  const int32_t exponent = internal::LargestExponent<kRows>(TilesOf(params, some_row), scratch);
  if (threadIdx.x >= kRows || row >= params.num_rows) return;
  params.exponents[blockIdx.y * params.num_rows + row] = exponent;
}

template <int kRows>
__global__ void __launch_bounds__(kJoinThreads) ShardSumsKernel(const ShardSumsParams params) {
  __shared__ int64_t scratch[internal::kJoinScratch<kRows>];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x % kRows;
  const int64_t some_row = row < params.num_rows ? row : params.num_rows - 1;
  const bool has_squares = params.wants_sum_squares && blockIdx.y == 0;
  const RowSums sums = internal::SumTiles<kRows>(
      TilesOf(params, some_row), params.exponents[blockIdx.y * params.num_rows + some_row],
      has_squares, scratch);
  if (threadIdx.x >= kRows || row >= params.num_rows) return;
  const int64_t first_field = blockIdx.y == 0 ? 0 : NumSumFields(params.wants_sum_squares, false);
  int64_t* const fields = params.row_sums + first_field * params.num_rows + row;
  fields[0] = sums.sum;
  fields[params.num_rows] = sums.weighted;
  if (has_squares) fields[2 * params.num_rows] = sums.sum_squares;
  if (blockIdx.y != 0 || params.target_columns == nullptr) return;
  // One shard has the target, so the sum of the bits over all shards is exact.
  const bool has_target = params.target_columns[row] >= 0;
  int64_t* const target =
      params.row_sums + row +
      NumSumFields(params.wants_sum_squares, params.entropy_sums != nullptr) * params.num_rows;
  target[0] = has_target ? __float_as_int(params.target_logits[row]) : 0;
  target[params.num_rows] = has_target ? 1 : 0;
}

__global__ void __launch_bounds__(kScoresThreads)
    ShardScoresKernel(const ShardScoresParams params) {
  const int64_t num_rows = params.scores.num_rows;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kScoresThreads + threadIdx.x;
  if (row >= num_rows) return;
  const int64_t* const fields = params.row_sums + row;
  internal::JoinedSums joined;
  joined.sums.exponent = params.exponents[row];
  joined.sums.sum = fields[0];
  joined.sums.weighted = fields[num_rows];
  if (params.has_sum_squares) joined.sums.sum_squares = fields[2 * num_rows];
  joined.entropy_sums = joined.sums;
  joined.has_entropy_sums = params.scores.entropy != nullptr && params.has_entropy_sums;
  if (joined.has_entropy_sums) {
    const int64_t* const entropy_fields =
        fields + NumSumFields(params.has_sum_squares, false) * num_rows;
    joined.entropy_sums.exponent = params.exponents[num_rows + row];
    joined.entropy_sums.sum = entropy_fields[0];
    joined.entropy_sums.weighted = entropy_fields[num_rows];
  }
  if (params.target_logits != nullptr) {
    const int64_t num_fields = NumSumFields(params.has_sum_squares, params.has_entropy_sums);
    params.target_logits[row] = __int_as_float(static_cast<int32_t>(fields[num_fields * num_rows]));
  }
  internal::WriteScores(params.scores, row, joined);
}

bool IsValid(const ShardSumsParams& params) {
  const bool has_valid_tiles =
      params.num_tiles == 0 ||
      (params.num_tiles >= 1 && params.num_tiles <= NumTiles(1 << 20) &&
       params.layout.row_stride >= 1 && params.layout.tile_stride >= 1 && params.sums != nullptr);
  return params.num_rows >= 0 && params.num_rows <= INT32_MAX && has_valid_tiles &&
         (params.target_columns == nullptr || params.target_logits != nullptr) &&
         params.exponents != nullptr;
}

dim3 Grid(const ShardSumsParams& params, int rows) {
  return {static_cast<uint32_t>((params.num_rows + rows - 1) / rows),
          static_cast<uint32_t>(NumSumSets(params.entropy_sums != nullptr)), 1};
}

}  // namespace

cudaError_t LaunchShardExponents(const ShardSumsParams& params, cudaStream_t stream) {
  constexpr int kRows = internal::kJoinRowsOfLargeBatch;
  if (params.num_rows == 0) return cudaSuccess;
  if (!IsValid(params)) return cudaErrorInvalidValue;
  if (params.num_rows <= kRowMajorRowsMax) {
    ShardExponentsKernel<1><<<Grid(params, 1), kJoinThreads, 0, stream>>>(params);
  } else {
    ShardExponentsKernel<kRows><<<Grid(params, kRows), kJoinThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t LaunchShardSums(const ShardSumsParams& params, cudaStream_t stream) {
  constexpr int kRows = internal::kJoinRowsOfLargeBatch;
  if (params.num_rows == 0) return cudaSuccess;
  if (!IsValid(params) || params.row_sums == nullptr) return cudaErrorInvalidValue;
  if (params.num_rows <= kRowMajorRowsMax) {
    ShardSumsKernel<1><<<Grid(params, 1), kJoinThreads, 0, stream>>>(params);
  } else {
    ShardSumsKernel<kRows><<<Grid(params, kRows), kJoinThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t LaunchShardScores(const ShardScoresParams& params, cudaStream_t stream) {
  if (params.scores.num_rows == 0) return cudaSuccess;
  if (!internal::HasValidOutputs(params.scores) || params.exponents == nullptr ||
      params.row_sums == nullptr ||
      (params.scores.sum_p_squared != nullptr && !params.has_sum_squares)) {
    return cudaErrorInvalidValue;
  }
  const int64_t blocks = (params.scores.num_rows + kScoresThreads - 1) / kScoresThreads;
  ShardScoresKernel<<<static_cast<uint32_t>(blocks), kScoresThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
