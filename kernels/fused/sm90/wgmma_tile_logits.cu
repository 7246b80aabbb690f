// TileLogitsKernel: recomputes the logits of listed (row, tile) pairs and lists the largest.
//
// Idea      One block multiplies a group of rows by the tile that they share: the hidden rows are
//           gathered, the tile's weight rows are contiguous. The logits stay in registers; only
//           those that can be among the row's k largest are written (tile_candidates.cuh).
// Work      One block per group: up to kRows rows x 192 columns, one warpgroup per 64 rows. It steps
//           along the hidden dimension by 64, through a ring of stages that all threads fill. Two
//           blocks of 64 or 128 rows share a multiprocessor, so that one loads while the other one
//           starts or lists.
// Traffic   24 KiB of weight per step and 128 bytes per row and step; rows that do not exist are not
//           read. Writes 8 (k - r) bytes per pair of rank r.
// Numerics  Adds the same products in the same order as the fused kernel (wgmma, 16 at a time), so
//           the logits are bit-identical.
// Limits    The limits of LaunchFusedPartials apply.
// Source    Our own, with CUTLASS's wrappers of the instructions.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "kernels/common/dtype.h"
#include "kernels/common/tensor_core.cuh"
#include "kernels/fused/lane_logits.cuh"
#include "kernels/fused/tile_candidates.cuh"
#include "kernels/fused/tile_logits.h"

namespace logprobd::kernels::internal {
namespace {

constexpr int kStep = 64;        // elements along the hidden dimension
constexpr int kChunkBytes = 16;  // bytes of one asynchronous copy
constexpr int kRowChunks = 8;    // chunks of a row per step
constexpr int kRowBytes = kRowChunks * kChunkBytes;
constexpr int kChunkElements = kChunkBytes / 2;
static_assert(kStep == kSplitAlignment);

/// Parameters of the kernel. The weight starts with the shard's first column.
struct DeviceParams {
  const std::byte* hidden;
  int64_t hidden_pitch;  // bytes from one hidden row to the next
  int64_t weight_pitch;  // bytes from one weight row to the next
  const std::byte* weight;
  int32_t weight_columns;  // columns from the weight's first to the end of the vocabulary
  int32_t hidden_size;
  int32_t num_splits;
  const int32_t* order;
  const TileGroup* groups;
  const int32_t* num_groups;
  CandidateParams candidates;
};

/// Shared-memory layout and instructions of one block's product.
template <int kRows, class Element>
struct TileProduct {
  static constexpr int kThreads = kRows * 2;
  static constexpr int kStages = kRows == 64 ? 3 : kRows == 128 ? 2 : 4;
  static constexpr int kSmBlocks = kRows == 256 ? 1 : 2;
  static constexpr int kAhead = kStages - 1;  // steps whose loads are in flight
  static constexpr int kHiddenBytes = kRows * kRowBytes;
  static constexpr int kWeightBytes = kTileColumns * kRowBytes;
  static constexpr int kSharedBytes = kStages * (kHiddenBytes + kWeightBytes);
  using Atom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using HiddenLayout = decltype(cute::tile_to_shape(
      Atom{}, cute::Shape<cute::Int<kRows>, cute::Int<kStep>, cute::Int<kStages>>{}));
  using WeightLayout = decltype(cute::tile_to_shape(
      Atom{}, cute::Shape<cute::Int<kTileColumns>, cute::Int<kStep>, cute::Int<kStages>>{}));
  using BlockShape = cute::Shape<cute::Int<64>, cute::Int<kTileColumns>, cute::Int<kStep>>;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, BlockShape>(),
      cute::Layout<cute::Shape<cute::Int<kRows / 64>, cute::_1, cute::_1>>{}));
};

template <int kRows, class Element>
__global__ void __launch_bounds__(kRows * 2, TileProduct<kRows, Element>::kSmBlocks)
    TileLogitsKernel(const __grid_constant__ DeviceParams params) {
  using namespace cute;
  using Product = TileProduct<kRows, Element>;
  constexpr int kStages = Product::kStages;
  if (static_cast<int32_t>(blockIdx.x) >= *params.num_groups) return;
  const TileGroup group = params.groups[blockIdx.x];
  extern __shared__ __align__(1024) std::byte stages[];
  std::byte* const hidden_stages = stages;
  std::byte* const weight_stages = stages + kStages * Product::kHiddenBytes;

  // A thread copies one chunk of every (kRows / 4)-th row. The 128-byte swizzle stores chunk c of
  // row r at index c ^ (r % 8).
  constexpr int kRowStride = Product::kThreads / kRowChunks;
  constexpr int kHiddenCopies = kRows / kRowStride;
  constexpr int kWeightCopies = kTileColumns / kRowStride;
  static_assert(kRowStride % kRowChunks == 0 && kTileColumns % kRowStride == 0);
  const int thread = static_cast<int>(threadIdx.x);
  const int chunk = thread % kRowChunks;
  const int first_row = thread / kRowChunks;
  const uint32_t offset_in_stage =
      first_row * kRowBytes + (chunk ^ (first_row % kRowChunks)) * kChunkBytes;
  const uint32_t hidden_to = cast_smem_ptr_to_uint(hidden_stages) + offset_in_stage;
  const uint32_t weight_to = cast_smem_ptr_to_uint(weight_stages) + offset_in_stage;
  int32_t hidden_rows[kHiddenCopies];  // a row takes fewer registers than its address
#pragma unroll
  for (int i = 0; i < kHiddenCopies; ++i) {
    const int32_t member = first_row + i * kRowStride;
    hidden_rows[i] =
        member < group.count ? params.order[group.begin + member] / params.candidates.top_k : -1;
  }
  const int32_t first_column = group.tile * kTileColumns + first_row;
  const std::byte* const weight_from =
      params.weight + first_column * params.weight_pitch + chunk * kChunkBytes;

  const int32_t weight_steps = (params.hidden_size + kStep - 1) / kStep;
  const int32_t num_steps = weight_steps * params.num_splits;
  int32_t weight_step = 0;
  const auto load = [&](int32_t step) {
    if (step < num_steps) {
      const int32_t elements = params.hidden_size - weight_step * kStep - chunk * kChunkElements;
      const int32_t bytes = min(max(elements * 2, 0), kChunkBytes);
      const int stage = step % kStages;
#pragma unroll
      for (int i = 0; i < kHiddenCopies; ++i) {
        if (hidden_rows[i] < 0) continue;  // sums of rows that do not exist are not used
        const int64_t offset = bytes > 0 ? int64_t{step} * kRowBytes + chunk * kChunkBytes : 0;
        CopyPartOfChunk(hidden_to + stage * Product::kHiddenBytes + i * kRowStride * kRowBytes,
                        params.hidden + hidden_rows[i] * params.hidden_pitch + offset, bytes);
      }
#pragma unroll
      for (int i = 0; i < kWeightCopies; ++i) {
        const bool exists = bytes > 0 && first_column + i * kRowStride < params.weight_columns;
        const std::byte* const from =
            weight_from + i * kRowStride * params.weight_pitch + int64_t{weight_step} * kRowBytes;
        CopyPartOfChunk(weight_to + stage * Product::kWeightBytes + i * kRowStride * kRowBytes,
                        exists ? from : params.weight, exists ? bytes : 0);
      }
      if (++weight_step == weight_steps) weight_step = 0;
    }
    cp_async_fence();  // also without loads, because cp_async_wait counts the groups
  };

  typename Product::Mma mma;
  Tensor hidden = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(hidden_stages)),
                              typename Product::HiddenLayout{});
  Tensor weight = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(weight_stages)),
                              typename Product::WeightLayout{});
  const auto thread_mma = mma.get_slice(thread);
  Tensor a = thread_mma.make_fragment_A(thread_mma.partition_A(hidden));
  Tensor b = thread_mma.make_fragment_B(thread_mma.partition_B(weight));
  Tensor dots = partition_fragment_C(mma, Shape<Int<kRows>, Int<kTileColumns>>{});
  clear(dots);

  const bool multiplies = thread / 128 * 64 < group.count;  // uniform within a warpgroup
  for (int32_t step = 0; step < Product::kAhead; ++step) load(step);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int32_t step = 0; step < num_steps; ++step) {
    cp_async_wait<Product::kAhead - 1>();
    cutlass::arch::fence_view_async_shared();  // makes the copies visible to the tensor cores
    warpgroup_wait<0>();
    __syncthreads();  // all threads are done with step - 1, whose stage is filled next
    if (multiplies) {
      warpgroup_fence_operand(dots);
      warpgroup_arrive();
      gemm(mma, a(_, _, _, step % kStages), b(_, _, _, step % kStages), dots);
      warpgroup_commit_batch();
    }
    load(step + Product::kAhead);
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(dots);

  const int warp_row = thread / 32 * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (warp_row + half * 8 >= group.count) continue;  // true for the whole warp
    const int32_t member = warp_row + half * 8 + thread % 32 / 4;
    const int32_t pair = member < group.count ? params.order[group.begin + member] : -1;
    const auto dot = [&dots, half](int i) -> float& {
      return dots(make_coord(i % 2, half, i / 2), 0, 0);
    };
    WriteTileCandidates(params.candidates, LaneLogits<decltype(dot)>{dot}, pair, group.tile,
                        thread % 4 * 2);
  }
}

template <int kRows, class Element>
cudaError_t LaunchAs(const DeviceParams& params, int64_t blocks, cudaStream_t stream) {
  using Product = TileProduct<kRows, Element>;
  const auto kernel = TileLogitsKernel<kRows, Element>;
  if (const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Product::kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  kernel<<<static_cast<uint32_t>(blocks), Product::kThreads, Product::kSharedBytes, stream>>>(
      params);
  return cudaGetLastError();
}

template <class Element>
cudaError_t LaunchAs(const DeviceParams& params, int32_t rows, int64_t blocks,
                     cudaStream_t stream) {
  return rows == 64    ? LaunchAs<64, Element>(params, blocks, stream)
         : rows == 128 ? LaunchAs<128, Element>(params, blocks, stream)
                       : LaunchAs<256, Element>(params, blocks, stream);
}

}  // namespace

cudaError_t LaunchWgmmaTileLogits(const TileLogitsParams& params, cudaStream_t stream) {
  const FusedPartialsParams& partials = *params.partials;
  const int64_t first_column = partials.tile_begin * kTileColumns;
  const DeviceParams device = {
      .hidden = static_cast<const std::byte*>(partials.hidden) +
                params.row_begin * partials.hidden_stride * 2,
      .hidden_pitch = partials.hidden_stride * 2,
      .weight_pitch = partials.weight_stride * 2,
      .weight = static_cast<const std::byte*>(partials.weight),
      .weight_columns = static_cast<int32_t>(partials.vocab_size - first_column),
      .hidden_size = static_cast<int32_t>(partials.hidden_size),
      .num_splits = partials.num_splits,
      .order = params.order,
      .groups = params.groups,
      .num_groups = params.num_groups,
      .candidates = CandidateParamsOf(params),
  };
  return partials.dtype == Dtype::kBf16
             ? LaunchAs<cutlass::bfloat16_t>(device, params.group_pairs, params.num_groups_max,
                                             stream)
             : LaunchAs<cutlass::half_t>(device, params.group_pairs, params.num_groups_max, stream);
}

}  // namespace logprobd::kernels::internal
