// ListedLogitsKernel: computes the logits of listed (row, id) pairs.
//
// Idea      The dot products of eight pairs are the diagonal of one small matrix product. The other
//           56 sums, and half of the instruction's rows, are discarded: reading the weight's rows
//           dominates the time.
// Work      One warp per eight pairs; a lane reads 8 bytes of a row at a time. Launches of few pairs
//           have one block per multiprocessor, so a lane has four times as many loads in flight.
// Traffic   Reads one weight row and one hidden row per pair; the hidden row comes from a cache
//           when pairs of the same row are adjacent.
// Numerics  mma.sync adds 16 products at a time to an fp32 sum, as wgmma does on Hopper; a test
//           requires the same bits. There the order of the 16 products does not affect the sum, so
//           a lane owns four adjacent elements. Other GPUs may add fewer products at a time, so
//           each element has the place that it has in kernels/fused/sm80.
// Limits    2^31 - 1 pairs per launch.
// Source    Our own; PTX defines the layout of fragments (mma.m16n8k16).

#include "kernels/common/dtype.h"
#include "kernels/common/tensor_core.cuh"
#include "kernels/common/tile_sums.cuh"
#include "kernels/fused/checks.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/listed_logits.h"
#include "kernels/fused/sm90/wgmma_launch.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 256;
/// Blocks of a multiprocessor: few, so that registers suffice for the loads in flight.
constexpr int kSmBlocks = 3;
constexpr int kSmBlocksTwoLoads = 2;  // if a lane's elements are not adjacent
constexpr int kFewBlocksMax = 132;    // multiprocessors of an H100 or H200
constexpr int kWarpPairs = 8;
constexpr int kBlockPairs = kBlockThreads / 32 * kWarpPairs;
constexpr int kStep = 16;
constexpr int kUnroll = 8;      // steps whose loads are in flight
constexpr int kUnrollFew = 32;  // the same for launches of at most kFewBlocksMax blocks

/// The elements of a lane in each step of 16: two, and two more kSecond elements further. Their
/// places in the instruction are 2 q, 2 q + 1 and 2 q + 8, 2 q + 9 for lane q of a quad.
template <bool kIsAdjacent>
struct LaneElements {
  static constexpr int kPitch = kIsAdjacent ? 4 : 2;  ///< Elements from one lane to the next.
  static constexpr int kSecond = kIsAdjacent ? 2 : 8;

  /// Loads the lane's elements. The asm is volatile because the compiler would otherwise delay the
  /// load to save registers.
  static __device__ __forceinline__ uint2 Load(const uint16_t* from) {
    uint2 value;
    if constexpr (kIsAdjacent) {
      asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                   : "=r"(value.x), "=r"(value.y)
                   : "l"(from));
    } else {
      asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value.x) : "l"(from));
      asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value.y) : "l"(from + kSecond));
    }
    return value;
  }

  /// Loads those of the lane's elements that are among the first `count` from `from` on and sets
  /// the others to zero. A row has memory for a multiple of 8 elements.
  static __device__ __forceinline__ uint2 LoadUpTo(const uint16_t* from, int64_t count) {
    if (count <= 0) return make_uint2(0, 0);
    uint2 value;
    if (kIsAdjacent || count > kSecond) {
      value = Load(from);
    } else {
      asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value.x) : "l"(from));
    }
    if (count < 2) value.x &= 0xFFFFU;
    if (count < kSecond + 1) value.y = 0;
    if (count < kSecond + 2) value.y &= 0xFFFFU;
    return value;
  }
};

/// Computes sums += a b^T for eight rows of a and eight rows of b.
template <Dtype kDtype>
__device__ __forceinline__ void AddStep(float (&sums)[4], uint2 a, uint2 b) {
  const uint32_t rows[4] = {a.x, 0, a.y, 0};
  AddProducts<kDtype>(sums, rows, b.x, b.y);
}

/// Adds the products of as many whole groups of kCount steps as the row has from `k` on, and moves
/// `k` behind them. The loads of a group are in flight together.
template <Dtype kDtype, class Elements, int kCount>
__device__ __forceinline__ void AddGroups(float (&sums)[4], const uint16_t* hidden,
                                          const uint16_t* weight, int64_t hidden_size, int64_t& k) {
  for (; k + kStep * kCount <= hidden_size; k += kStep * kCount) {
    uint2 a[kCount];
    uint2 b[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      a[i] = Elements::Load(hidden + k + i * kStep);
      b[i] = Elements::Load(weight + k + i * kStep);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) AddStep<kDtype>(sums, a[i], b[i]);
  }
}

template <Dtype kDtype, bool kIsFew, bool kIsAdjacent>
__global__ void __launch_bounds__(kBlockThreads,
                                  kIsFew ? 1 : (kIsAdjacent ? kSmBlocks : kSmBlocksTwoLoads))
    ListedLogitsKernel(const ListedLogitsParams params) {
  using Elements = LaneElements<kIsAdjacent>;
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

  const int64_t lane_begin = in_quad * Elements::kPitch;
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
      AddGroups<kDtype, Elements, kUnrollFew>(sums, hidden, weight, partials.hidden_size, k);
    }
    AddGroups<kDtype, Elements, kUnroll>(sums, hidden, weight, partials.hidden_size, k);
    for (; k < partials.hidden_size; k += kStep) {
      const int64_t count = partials.hidden_size - k - lane_begin;
      AddStep<kDtype>(sums, Elements::LoadUpTo(hidden + k, count),
                      Elements::LoadUpTo(weight + k, count));
    }
    hidden += SplitPitch(partials.hidden_size);
  }
  // The sum of pair p is element p of row p of the product.
  if (in_quad != quad / 2 || !exists) return;
  const float bias = partials.bias == nullptr ? 0.0F : partials.bias[id];
  params.logits[pair] = LogitOf(quad % 2 == 0 ? sums[0] : sums[1], bias, partials.transform);
}

/// Launches the instance for a number of blocks.
template <Dtype kDtype, bool kIsAdjacent>
cudaError_t LaunchOf(const ListedLogitsParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<uint32_t>((params.count + kBlockPairs - 1) / kBlockPairs);
  const auto kernel = blocks <= kFewBlocksMax ? ListedLogitsKernel<kDtype, true, kIsAdjacent>
                                              : ListedLogitsKernel<kDtype, false, kIsAdjacent>;
  kernel<<<blocks, kBlockThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <Dtype kDtype>
cudaError_t LaunchOf(const ListedLogitsParams& params, FusedArch arch, cudaStream_t stream) {
  return arch == FusedArch::kSm90 ? LaunchOf<kDtype, true>(params, stream)
                                  : LaunchOf<kDtype, false>(params, stream);
}

}  // namespace

cudaError_t LaunchListedLogits(const ListedLogitsParams& params, cudaStream_t stream) {
  return LaunchListedLogitsAs(params, FusedArchOfCurrentDevice(), stream);
}

cudaError_t LaunchListedLogitsAs(const ListedLogitsParams& params, FusedArch arch,
                                 cudaStream_t stream) {
  if (params.count < 0 || params.count > INT32_MAX) return cudaErrorInvalidValue;
  if (params.count == 0 || params.partials.num_rows == 0) return cudaSuccess;
  if (!internal::HasValidOperands(params.partials) || params.partials.row_count != nullptr ||
      params.ids == nullptr || params.logits == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (arch == FusedArch::kNone) return cudaErrorNotSupported;
  return params.partials.dtype == Dtype::kBf16 ? LaunchOf<Dtype::kBf16>(params, arch, stream)
                                               : LaunchOf<Dtype::kF16>(params, arch, stream);
}

}  // namespace logprobd::kernels
