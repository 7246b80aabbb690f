#pragma once

// SwappedMainloop: loads weight rows as operand A and hidden rows as operand B.
//
// Idea      wgmma multiplies 64 rows of A by any multiple of eight rows of B. With the weight as A,
//           the number of hidden rows of a block is a multiple of 16 instead of 64, so few rows are
//           empty. A block holds the 192 columns of a tile as three products of 64 columns.
//           The columns are permuted on the way into shared memory, so that each warp holds
//           consecutive links of the chains in which a tile is summed (tile_sums.cuh): warp w gets
//           columns 48 w to 48 w + 47, and product p of a warp gets 16 columns of these.
// Work      One elected thread of the producer warp issues the TMA loads. The two blocks of a
//           cluster load the products of a weight tile in turn, each for both.
// Traffic   Each step of 64 along K reads 128 bytes per hidden row and per column of the tile.
// Limits    Pairs of blocks along the rows.
// Source    Our own, derived from CUTLASS's warp-specialised TMA mainloop.

#include <cuda.h>

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cuda_host_adapter.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "kernels/common/tile.h"
#include "kernels/fused/sm90/head_loads.cuh"

namespace logprobd::kernels::internal {

/// How the columns of a tile are distributed over the products and warps of a warpgroup.
struct SwappedColumns {
  static constexpr int kProducts = 3;
  static constexpr int kWarps = 4;
  static constexpr int kGroup = 16;  ///< Columns that a warp holds of a product.

  /// Returns the first column of a group of 16, relative to the tile.
  static constexpr CUTLASS_HOST_DEVICE int Begin(int warp, int product) {
    return (warp * kProducts + product) * kGroup;
  }
};
static_assert(SwappedColumns::Begin(SwappedColumns::kWarps, 0) == kTileColumns);

template <class Base>
struct SwappedMainloop : HeadLoads<Base, 1> {
  using Loads = HeadLoads<Base, 1>;
  using typename Base::GmemTiledCopyA;
  using typename Base::GmemTiledCopyB;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::SmemLayoutA;
  using typename Base::SmemLayoutB;
  using typename Base::TensorStorage;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;

  using Loads::kStep;
  static constexpr int kStageElements = kTileColumns * kStep;

  static_assert(cute::is_same_v<ClusterShape, cute::Shape<cute::_1, cute::_2, cute::_1>>);
  static_assert(cute::is_same_v<GmemTiledCopyA, cute::SM90_TMA_LOAD_MULTICAST>);
  static_assert(cute::is_same_v<GmemTiledCopyB, cute::SM90_TMA_LOAD>);
  static_assert(cute::cosize_v<SmemLayoutA> == kStageElements * Base::DispatchPolicy::Stages);

  using typename Loads::Arguments;
  struct Params : Loads::Params {
    CUtensorMap
        whole_tiles;  ///< [tile, product, warp, 16 columns, K]; tiles without empty columns.
    CUtensorMap column_groups;  ///< [column, K], for the last tile, which may have empty columns.
    int32_t num_whole_tiles = 0;
    bool is_valid = false;  ///< False when a tensor map could not be made.
  };

  template <class Problem>
  static Params to_underlying_arguments(const Problem& problem, const Arguments& arguments,
                                        void* workspace) {
    Params params;
    static_cast<typename Loads::Params&>(params) =
        Loads::to_underlying_arguments(problem, arguments, workspace);
    const auto columns = static_cast<uint64_t>(cute::get<0>(problem));
    const auto depth = static_cast<uint64_t>(arguments.weight_depth);
    const auto pitch = static_cast<uint64_t>(cute::get<0>(arguments.dA)) * sizeof(uint16_t);
    constexpr uint64_t kGroup = SwappedColumns::kGroup;
    constexpr uint64_t kWarps = SwappedColumns::kWarps;
    constexpr uint64_t kProducts = SwappedColumns::kProducts;
    const uint64_t whole_tiles = columns / kTileColumns;
    // A dimension of a tensor map is at least 1; without whole tiles the map is not used.
    const cuuint64_t tile_sizes[] = {depth, kGroup, kWarps, kProducts,
                                     whole_tiles > 0 ? whole_tiles : 1};
    const cuuint64_t tile_pitches[] = {pitch, kProducts * kGroup * pitch, kGroup * pitch,
                                       kTileColumns * pitch};
    const cuuint32_t tile_box[] = {kStep, kGroup, kWarps, 1, 1};
    const cuuint64_t group_sizes[] = {depth, columns};
    const cuuint64_t group_pitches[] = {pitch};
    const cuuint32_t group_box[] = {kStep, kGroup};
    params.is_valid =
        Encode(params.whole_tiles, arguments.ptr_A, 5, tile_sizes, tile_pitches, tile_box) &&
        Encode(params.column_groups, arguments.ptr_A, 2, group_sizes, group_pitches, group_box);
    params.num_whole_tiles = static_cast<int32_t>(whole_tiles);
    return params;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& params) {
    cute::prefetch_tma_descriptor(&params.whole_tiles);
    cute::prefetch_tma_descriptor(&params.column_groups);
    cute::prefetch_tma_descriptor(params.tma_load_b.get_tma_descriptor());
  }

  /// Fills one stage after another as the consumers free them; one elected thread does the work.
  template <class WeightTensor, class HiddenTensor, class StepIterator, class Coordinate>
  CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline, PipelineState write,
                           const cute::tuple<WeightTensor, HiddenTensor>& inputs,
                           const Coordinate& coordinate, StepIterator step, int num_steps,
                           int /*thread*/, uint32_t block_rank, TensorStorage& storage) {
    using namespace cute;
    using BarrierType = typename MainloopPipeline::ProducerBarrierType;
    if (elect_one_sync() == 0) return;
    Tensor hidden_stages = make_tensor(make_smem_ptr(storage.smem_B.data()), SmemLayoutB{});
    auto [column_tile, row_tile, unused_k, batch] = coordinate;
    auto hidden_copy = params.tma_load_b.get_slice(0);
    const int32_t readable_tile = Loads::ReadableTile(params, row_tile);
    Tensor hidden_from = hidden_copy.partition_S(get<1>(inputs)(_, _, readable_tile, _, batch));
    Tensor hidden_to = hidden_copy.partition_D(hidden_stages);

    int32_t weight_step = 0;
    uint32_t turn = block_rank;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; num_steps > 0; --num_steps, ++step, ++write, ++turn) {
      pipeline.producer_acquire(write);
      BarrierType* const barrier = pipeline.producer_get_barrier(write);
      auto* const stage = storage.smem_A.data() + write.index() * kStageElements;
      LoadWeight(params, barrier, stage, column_tile, weight_step * kStep, turn % 2);
      copy(params.tma_load_b.with(*barrier, 0, params.hidden_hint), hidden_from(_, _, _, *step),
           hidden_to(_, _, _, write.index()));
      if (++weight_step == params.weight_steps) weight_step = 0;
    }
  }

 private:
  static bool Encode(CUtensorMap& map, const void* weight, uint32_t rank, const cuuint64_t* sizes,
                     const cuuint64_t* pitches, const cuuint32_t* box) {
    const cuuint32_t steps[] = {1, 1, 1, 1, 1};
    return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
               &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, rank, const_cast<void*>(weight), sizes,
               pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }

  /// Loads every second product of a step, starting with product `first`, for both blocks.
  template <class BarrierType, class Element>
  CUTLASS_DEVICE static void LoadWeight(const Params& params, BarrierType* barrier, Element* stage,
                                        int32_t tile, int32_t k, uint32_t first) {
    constexpr uint16_t kBothBlocks = 3;
    constexpr int kGroupElements = SwappedColumns::kGroup * kStep;
    auto* const arrival = reinterpret_cast<uint64_t*>(barrier);
    const auto hint = static_cast<uint64_t>(params.weight_hint);
    for (auto product = static_cast<int32_t>(first); product < SwappedColumns::kProducts;
         product += 2) {
      Element* const to = stage + product * SwappedColumns::kWarps * kGroupElements;
      if (tile < params.num_whole_tiles) {
        cute::SM90_TMA_LOAD_MULTICAST_5D::copy(&params.whole_tiles, arrival, kBothBlocks, hint, to,
                                               k, 0, 0, product, tile);
        continue;
      }
      for (int warp = 0; warp < SwappedColumns::kWarps; ++warp) {
        const int32_t column = tile * kTileColumns + SwappedColumns::Begin(warp, product);
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&params.column_groups, arrival, kBothBlocks, hint,
                                               to + warp * kGroupElements, k, column);
      }
    }
  }
};

}  // namespace logprobd::kernels::internal
