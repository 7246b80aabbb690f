// ListedLogitsKernel: computes the logits of listed (row, id) pairs.
//
// Idea      The dot products of eight pairs are the diagonal of one small matrix product. The other
//           56 sums, and half of the instruction's rows, are discarded: reading the weight's rows
//           dominates the time.
// Work      One warp per eight pairs; a lane reads 8 bytes of a row at a time. Launches of few pairs
//           have one block per multiprocessor, so a lane has four times as many loads in flight.
// Traffic   Reads one weight row and one hidden row per pair; the hidden row comes from a cache
//           when pairs of the same row are adjacent.
// Numerics  mma.sync adds 16 products at a time to an fp32 sum, as wgmma does; a test requires the
//           same bits. The order of the 16 products does not affect the sum, so a lane owns four
//           adjacent elements.
// Limits    2^31 - 1 pairs per launch.
// Source    Our own; PTX defines the layout of fragments (mma.m16n8k16).

#include "kernels/common/dtype.h"
#include "kernels/common/tile_sums.cuh"
#include "kernels/fused_sm90/fused_launch.h"
#include "kernels/fused_sm90/listed_logits.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kSmBlocks = 3;        // few blocks, so that registers suffice for the loads in flight
constexpr int kFewBlocksMax = 132;  // multiprocessors of an H100 or H200
constexpr int kWarpPairs = 8;
constexpr int kBlockPairs = kBlockThreads / 32 * kWarpPairs;
constexpr int kStep = 16;
constexpr int kLaneElements = 4;
constexpr int kUnroll = 8;      // steps whose loads are in flight
constexpr int kUnrollFew = 32;  // the same for launches of at most kFewBlocksMax blocks

/// Computes sums += a b^T for eight rows of a and eight rows of b.
template <Dtype kDtype>
__device__ __forceinline__ void AddProducts(float (&sums)[4], uint2 a, uint2 b) {
  if constexpr (kDtype == Dtype::kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, "
        "{%7,%8}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a.x), "r"(0), "r"(a.y), "r"(b.x), "r"(b.y));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, "
        "{%7,%8}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a.x), "r"(0), "r"(a.y), "r"(b.x), "r"(b.y));
  }
}

/// Loads four elements of a row. The asm is volatile because the compiler would otherwise delay the
/// load to save registers.
__device__ __forceinline__ uint2 LoadFour(const uint16_t* from) {
  uint2 value;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from));
  return value;
}

/// Loads the first `count` of four elements of a row and sets the others to zero.
__device__ __forceinline__ uint2 LoadUpTo(const uint16_t* from, int64_t count) {
  if (count <= 0) return make_uint2(0, 0);
  uint2 value = LoadFour(from);
  if (count < 2) value.x &= 0xFFFFU;
  if (count < 3) value.y = 0;
  if (count < 4) value.y &= 0xFFFFU;
  return value;
}

/// Adds the products of as many whole groups of kCount steps as the row has from `k` on, and moves
/// `k` behind them. The loads of a group are in flight together.
template <Dtype kDtype, int kCount>
__device__ __forceinline__ void AddGroups(float (&sums)[4], const uint16_t* hidden,
                                          const uint16_t* weight, int64_t hidden_size, int64_t& k) {
  for (; k + kStep * kCount <= hidden_size; k += kStep * kCount) {
    uint2 a[kCount];
    uint2 b[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      a[i] = LoadFour(hidden + k + i * kStep);
      b[i] = LoadFour(weight + k + i * kStep);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) AddProducts<kDtype>(sums, a[i], b[i]);
  }
}

template <Dtype kDtype, bool kIsFew>
__global__ void __launch_bounds__(kBlockThreads, kIsFew ? 1 : kSmBlocks)
    ListedLogitsKernel(const ListedLogitsParams params) {
  const FusedPartialsParams& partials = params.partials;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int quad = lane / 4;
  const int in_quad = lane % 4;
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kBlockPairs +
                       static_cast<int64_t>(threadIdx.x) / 32 * kWarpPairs + quad;
  int64_t row = -1;
  int64_t id = -1;
  if (pair < params.count) {
    row =
        params.rows == nullptr ? pair : static_cast<int64_t>(params.rows[pair]) - params.row_begin;
    id = params.ids[pair];
  }
  const int64_t id_end = partials.tile_end * kTileColumns;
  const bool exists = row >= 0 && row < partials.num_rows &&
                      id >= partials.tile_begin * kTileColumns && id < id_end &&
                      id < partials.vocab_size;
  if (!__any_sync(0xFFFFFFFFU, exists)) return;

  const int64_t lane_begin = in_quad * kLaneElements;
  const uint16_t* weight = static_cast<const uint16_t*>(partials.weight) + lane_begin;
  const uint16_t* hidden = static_cast<const uint16_t*>(partials.hidden) + lane_begin;
  if (exists) {  // the other lanes read the first rows; their sums are not used
    weight += (id - partials.tile_begin * kTileColumns) * partials.weight_stride;
    hidden += row * partials.hidden_stride;
  }
  float sums[4] = {0, 0, 0, 0};
  for (int split = 0; split < partials.num_splits; ++split) {
    int64_t k = 0;
    if constexpr (kIsFew) {
      AddGroups<kDtype, kUnrollFew>(sums, hidden, weight, partials.hidden_size, k);
    }
    AddGroups<kDtype, kUnroll>(sums, hidden, weight, partials.hidden_size, k);
    for (; k < partials.hidden_size; k += kStep) {
      const int64_t count = partials.hidden_size - k - lane_begin;
      AddProducts<kDtype>(sums, LoadUpTo(hidden + k, count), LoadUpTo(weight + k, count));
    }
    hidden += SplitPitch(partials.hidden_size);
  }
  // The sum of pair p is element p of row p of the product.
  if (in_quad != quad / 2 || !exists) return;
  const float bias = partials.bias == nullptr ? 0.0F : partials.bias[id];
  params.logits[pair] = LogitOf(quad % 2 == 0 ? sums[0] : sums[1], bias, partials.transform);
}

}  // namespace

cudaError_t LaunchListedLogits(const ListedLogitsParams& params, cudaStream_t stream) {
  if (params.count < 0 || params.count > INT32_MAX) return cudaErrorInvalidValue;
  if (params.count == 0 || params.partials.num_rows == 0) return cudaSuccess;
  if (!internal::HasValidOperands(params.partials) || params.partials.row_count != nullptr ||
      params.ids == nullptr || params.logits == nullptr) {
    return cudaErrorInvalidValue;
  }
  const auto blocks = static_cast<uint32_t>((params.count + kBlockPairs - 1) / kBlockPairs);
  const bool is_few = blocks <= kFewBlocksMax;
  const auto kernel = params.partials.dtype == Dtype::kBf16
                          ? (is_few ? ListedLogitsKernel<Dtype::kBf16, true>
                                    : ListedLogitsKernel<Dtype::kBf16, false>)
                          : (is_few ? ListedLogitsKernel<Dtype::kF16, true>
                                    : ListedLogitsKernel<Dtype::kF16, false>);
  kernel<<<blocks, kBlockThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
