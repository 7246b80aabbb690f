// MmaTileLogitsKernel: recomputes the logits of listed (row, tile) pairs and lists the largest.
//
// Idea      A block multiplies hidden rows that it gathers by the tile that they share. The logits
//           stay in registers; only those that can be among the row's k largest are written
//           (tile_candidates.cuh).
// Work      One block of kRows rows per part of a group. The parts of a group are adjacent blocks, so
//           that they read the weight at the same time.
// Traffic   A weight tile per part, mostly from the second-level cache, and the hidden rows; rows
//           that do not exist are not read. Writes 8 (k - r) bytes per pair of rank r.
// Numerics  The logits have the bits that they have in MmaKernel, which uses the same TileProduct.
// Limits    The limits of LaunchFusedPartials apply.
// Source    Our own.

#include <cstdint>

#include "kernels/fused/sm80/mma_kernel.cuh"
#include "kernels/fused/sm80/mma_launch.h"
#include "kernels/fused/tile_candidates.cuh"

namespace logprobd::kernels::internal {
namespace {

constexpr int kRows = 64;

/// Parameters of the kernel.
struct DeviceParams {
  ProductOperands operands;  ///< `hidden` is the row of pair 0.
  int32_t parts;             ///< Blocks per group.
  const int32_t* order;
  const TileGroup* groups;
  const int32_t* num_groups;
  CandidateParams candidates;
};

/// An epilogue that writes the candidates of the pairs of a group.
struct CandidateStore {
  const CandidateParams& params;
  const int32_t* order;  ///< Pairs of the group.
  int32_t num_pairs;     ///< Pairs of the group.

  template <class Logits>
  __device__ __forceinline__ void TakeRow(const Logits& logits, int32_t member, int32_t tile,
                                          int32_t lane_column) const {
    const int32_t pair = member < num_pairs ? order[member] : -1;
    WriteTileCandidates(params, logits, pair, tile, lane_column);
  }
};

template <Dtype kDtype>
__global__ void __launch_bounds__(TileProduct<kRows, kDtype>::kThreads,
                                  TileProduct<kRows, kDtype>::kSmBlocks)
    MmaTileLogitsKernel(const __grid_constant__ DeviceParams params) {
  extern __shared__ __align__(128) std::byte shared[];
  const auto block = static_cast<int32_t>(blockIdx.x);
  const int32_t group_index = block / params.parts;
  if (group_index >= *params.num_groups) return;
  const TileGroup group = params.groups[group_index];
  const int32_t first = block % params.parts * kRows;
  if (first >= group.count) return;
  const int32_t* const order = params.order + group.begin;

  TileProduct<kRows, kDtype> product(shared);
  product.Multiply(
      params.operands, group.tile * kTileColumns, group.count - first, [&](int32_t row) {
        return params.operands.hidden +
               order[first + row] / params.candidates.top_k * params.operands.hidden_pitch;
      });
  product.Exchange();
  const CandidateStore store{params.candidates, order, group.count};
  TakeRows(product, store, first, group.count, group.tile);
}

template <Dtype kDtype>
cudaError_t LaunchAs(const DeviceParams& params, int64_t groups, cudaStream_t stream) {
  using Product = TileProduct<kRows, kDtype>;
  const auto kernel = MmaTileLogitsKernel<kDtype>;
  if (const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Product::kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  kernel<<<static_cast<uint32_t>(groups * params.parts), Product::kThreads, Product::kSharedBytes,
           stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchMmaTileLogits(const TileLogitsParams& params, cudaStream_t stream) {
  const FusedPartialsParams& partials = *params.partials;
  DeviceParams device;
  device.operands = ProductOperandsOf(partials);
  device.operands.hidden += params.row_begin * device.operands.hidden_pitch;
  device.parts = (params.group_pairs + kRows - 1) / kRows;
  device.order = params.order;
  device.groups = params.groups;
  device.num_groups = params.num_groups;
  device.candidates = CandidateParamsOf(params);
  return partials.dtype == Dtype::kBf16
             ? LaunchAs<Dtype::kBf16>(device, params.num_groups_max, stream)
             : LaunchAs<Dtype::kF16>(device, params.num_groups_max, stream);
}

}  // namespace logprobd::kernels::internal
