// RebaseExponentialsKernel: turns a row's cached exponentials into operands of the products with
// hidden states and weight, and one factor per row.
//
// Idea      d_j = free 2^(y - K) + target [j = t] = f (2^(y - e) + target / f [j = t]) with
//           f = free 2^(e - K). If all tiles of a row have the same e, only the target's
//           exponential needs to change.
// Work      One block per row. The base e is the row's largest exponent, or a larger one if that is
//           too far below the row's sum. A warp scales a tile that has another exponent. Warps test
//           32 tiles at a time, since usually none needs scaling.
// Traffic   4 bytes per tile; 4 bytes per column of a scaled tile.
// Numerics  Exponentials are scaled by powers of two, which is exact unless they become denormal.
//           The factor is free times a power of two times 2^x with x in [0, 1), so the gradients
//           are bit-identical whatever the exponents of the cache are. The target is taken from
//           fp32. Its element is rounded to bf16, and the factor is corrected by that rounding, by
//           up to 2^-8 of itself: the target's gradient, the largest number of a flat row, is then
//           exact, at the price of an error of the other gradients no larger than their own.
// Limits    2^31 - 1 rows.
// Source    Our own.

#include <cfloat>
#include <cstdint>

#include "kernels/common/device_math.cuh"
#include "kernels/common/tile.h"
#include "kernels/row_ops/rebase_exponentials.h"

namespace logprobd::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xFFFFFFFFU;
constexpr int kVector = 8;  // columns, 16 bytes
constexpr int kTileVectors = kTileColumns / kVector;
static_assert(kTileVectors <= kWarpSize);

/// Largest distance of the row's sum above the base. The row's sum covers all shards and may be far
/// above this shard's exponents, but the factor and a quotient by it must be in range.
constexpr int64_t kGapMax = 60;

/// Returns 2^exponent, but 0 below the normal range and at most 2^127.
__device__ __forceinline__ float PowerOfTwo(int64_t exponent) {
  constexpr int64_t kBias = 127;
  const int64_t bits = min(max(exponent, -kBias), kBias) + kBias;
  return __int_as_float(static_cast<int32_t>(bits) << 23);
}

/// Returns the row's largest exponent, or kEmptyExponent if it has none. All threads must call it.
__device__ int32_t LargestExponent(const int32_t* exponents, int64_t num_tiles) {
  __shared__ int32_t largest;
  if (threadIdx.x == 0) largest = kEmptyExponent;
  __syncthreads();
  int32_t mine = kEmptyExponent;
  for (int64_t tile = threadIdx.x; tile < num_tiles; tile += kThreads) {
    mine = max(mine, exponents[tile]);
  }
  atomicMax(&largest, mine);
  __syncthreads();
  return largest;
}

__device__ __forceinline__ uint32_t Scaled(uint32_t pair, __nv_bfloat162 factor) {
  const __nv_bfloat162 scaled = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&pair), factor);
  return *reinterpret_cast<const uint32_t*>(&scaled);
}

/// Multiplies a tile by `factor`. One warp calls it with eight columns per lane; the last lanes
/// have no columns.
__device__ void ScaleTile(__nv_bfloat16* tile, float factor, int lane) {
  if (lane >= kTileVectors) return;
  auto* const words = reinterpret_cast<uint4*>(tile) + lane;
  uint4 eight = make_uint4(0, 0, 0, 0);
  if (factor != 0.0F) {
    const __nv_bfloat162 twice = __float2bfloat162_rn(factor);
    eight = *words;
    eight = make_uint4(Scaled(eight.x, twice), Scaled(eight.y, twice), Scaled(eight.z, twice),
                       Scaled(eight.w, twice));
  }
  *words = eight;
}

/// Base exponent of a row's converted exponentials, and the row's factor.
struct RowScale {
  int64_t base;
  float factor;
  // If true, exponentials become 0, the target's element becomes its gradient, and factor is 1.
  bool is_zero;
};

__device__ RowScale ScaleOf(const RowGradient& row, int32_t largest) {
  constexpr float kBound = 4e9F;  // above any exponent and any rounded log2_sum
  const float whole = ceilf(row.log2_sum);
  const auto sum = static_cast<int64_t>(fminf(fmaxf(whole, -kBound), kBound));
  RowScale scale;
  scale.base = max(int64_t{largest}, sum - kGapMax);
  const float part = Exp2(__fsub_rn(whole, row.log2_sum));
  scale.factor = __fmul_rn(__fmul_rn(row.free, part), PowerOfTwo(scale.base - sum));
  // A factor of NaN is kept.
  scale.is_zero = row.free == 0.0F || fabsf(scale.factor) < FLT_MIN;
  if (scale.is_zero) scale.factor = 1.0F;
  return scale;
}

__global__ void __launch_bounds__(kThreads)
    RebaseExponentialsKernel(const RebaseExponentialsParams params) {
  const int64_t i = blockIdx.x;
  const int32_t* const exponents = params.exponents + i * params.exponent_stride;
  __nv_bfloat16* const exponentials = params.exponentials + i * params.row_tiles * kTileColumns;
  const RowGradient row = params.rows[i];
  const RowScale scale = ScaleOf(row, LargestExponent(exponents, params.num_tiles));
  const auto lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int64_t first = threadIdx.x - lane; first < params.num_tiles; first += kThreads) {
    const int64_t mine = first + lane;
    const int32_t exponent = mine < params.num_tiles ? exponents[mine] : kEmptyExponent;
    const bool needs_scaling = scale.is_zero ? mine < params.num_tiles
                                             : exponent != scale.base && exponent != kEmptyExponent;
    for (uint32_t remaining = __ballot_sync(kFullWarp, needs_scaling); remaining != 0;
         remaining &= remaining - 1) {
      const int next = __ffs(static_cast<int>(remaining)) - 1;
      const int32_t tile_exponent = __shfl_sync(kFullWarp, exponent, next);
      const float factor = scale.is_zero ? 0.0F : PowerOfTwo(tile_exponent - scale.base);
      ScaleTile(exponentials + (first + next) * kTileColumns, factor, lane);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  params.factors[i] = scale.factor;
  const int32_t target = row.target_column;
  if (target < 0 || target >= params.num_tiles * kTileColumns) return;
  const float p = Exp2(MaxOrNan(row.target_exponent, kGradientExponentMin));
  const float gradient = __fadd_rn(row.free == 0.0F ? 0.0F : __fmul_rn(p, row.free), row.target);
  const __nv_bfloat16 element = __float2bfloat16_rn(__fdiv_rn(gradient, scale.factor));
  exponentials[target] = element;
  const float rounded = __bfloat162float(element);
  const bool is_normal = fabsf(rounded) >= FLT_MIN && fabsf(rounded) <= FLT_MAX;
  if (is_normal) params.factors[i] = __fdiv_rn(gradient, rounded);
}

}  // namespace

cudaError_t LaunchRebaseExponentials(const RebaseExponentialsParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (params.num_rows < 0 || params.num_rows > INT32_MAX || params.exponentials == nullptr ||
      reinterpret_cast<uintptr_t>(params.exponentials) % 16 != 0 || params.exponents == nullptr ||
      params.rows == nullptr || params.factors == nullptr || params.num_tiles < 1 ||
      params.num_tiles > params.row_tiles) {
    return cudaErrorInvalidValue;
  }
  RebaseExponentialsParams strided = params;
  if (strided.exponent_stride == 0) strided.exponent_stride = params.row_tiles;
  RebaseExponentialsKernel<<<static_cast<uint32_t>(params.num_rows), kThreads, 0, stream>>>(
      strided);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
