#pragma once

// MmaKernel: computes the tiles of a launch; an epilogue processes the dot products in registers.
//
// Idea      TileProduct, followed by an epilogue of the Hopper kernels, whose lanes hold the same
//           columns of a row.
// Work      One block per tile of kRows x 192. The blocks of kGroupColumns column tiles, all rows,
//           follow each other, so that those that run at the same time read few weight tiles,
//           mostly from the second-level cache.
// Traffic   Reads each weight tile once per kRows rows and each hidden row once per column tile,
//           mostly from the second-level cache; the epilogue writes.
// Numerics  See TileProduct and the epilogue. The order of tiles does not affect any bit.
// Limits    See LaunchFusedPartials; 2^31 - 1 tiles.
// Source    Our own.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/fused/lane_logits.cuh"
#include "kernels/fused/sm80/tile_product.cuh"

namespace logprobd::kernels::internal {

/// Column tiles that are computed together. With more rows than run at once, 8 column tiles and 13
/// row tiles of 128 rows occupy the 108 multiprocessors of an A100.
inline constexpr int32_t kGroupColumns = 8;

/// Calls `epilogue.TakeRow` for the rows of a warp, after TileProduct::Exchange. `block_row` is the
/// block's first row. A row at or beyond num_rows is processed only if the warp also holds a row
/// below num_rows.
template <class Product, class Epilogue>
__device__ __forceinline__ void TakeRows(Product& product, Epilogue& epilogue, int32_t block_row,
                                         int32_t num_rows, int32_t tile) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t warp_row = block_row + product.row();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (warp_row + half * 8 >= num_rows) continue;  // true for the whole warp
    const auto dot = [&product, half](int i) -> float& {
      constexpr int kHalfGroups = kTileColumns / kTileChains / 2;
      return product.dots[i / 2 / kHalfGroups][i / 2 % kHalfGroups][half * 2 + i % 2];
    };
    epilogue.TakeRow(LaneLogits<decltype(dot)>{dot}, warp_row + half * 8 + lane / 4, tile,
                     lane % 4 * 2);
  }
}

/// `row_count` points to the number of rows, at most epilogue_params.num_rows, or is null.
template <class Product, class Epilogue>
__global__ void __launch_bounds__(Product::kThreads, Product::kSmBlocks)
    MmaKernel(const __grid_constant__ ProductOperands operands,
              const __grid_constant__ typename Epilogue::Params epilogue_params,
              const int64_t* const row_count) {
  extern __shared__ __align__(128) std::byte shared[];
  // Rows from *row_count to the end of the block are computed too, as by the Hopper kernels.
  const int32_t num_rows =
      row_count == nullptr ? epilogue_params.num_rows : static_cast<int32_t>(*row_count);
  const int32_t row_tiles = (num_rows + Product::kRows - 1) / Product::kRows;
  const auto block = static_cast<int32_t>(blockIdx.x);
  if (block >= row_tiles * epilogue_params.num_tiles) return;
  const int32_t group = block / (row_tiles * kGroupColumns);
  const int32_t in_group = block - group * row_tiles * kGroupColumns;
  const int32_t columns = min(kGroupColumns, epilogue_params.num_tiles - group * kGroupColumns);
  const int32_t tile = group * kGroupColumns + in_group % columns;
  const int32_t block_row = in_group / columns * Product::kRows;

  Product product(shared);
  product.Multiply(operands, tile * kTileColumns, epilogue_params.num_rows - block_row,
                   [&](int32_t row) {
                     return operands.hidden + (int64_t{block_row} + row) * operands.hidden_pitch;
                   });
  product.Exchange();
  Epilogue epilogue(epilogue_params);
  TakeRows(product, epilogue, block_row, epilogue_params.num_rows, tile);
}

/// Enqueues MmaKernel for `params`, which must have been checked.
template <int kRows, Dtype kDtype, class Epilogue>
cudaError_t LaunchMmaKernel(const FusedPartialsParams& params,
                            const typename Epilogue::Params& epilogue, cudaStream_t stream) {
  using Product = TileProduct<kRows, kDtype>;
  const int64_t blocks =
      (params.num_rows + kRows - 1) / kRows * (params.tile_end - params.tile_begin);
  const auto kernel = MmaKernel<Product, Epilogue>;
  if (const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Product::kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  kernel<<<static_cast<uint32_t>(blocks), Product::kThreads, Product::kSharedBytes, stream>>>(
      ProductOperandsOf(params), epilogue, params.row_count);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels::internal
