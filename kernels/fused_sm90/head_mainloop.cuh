#pragma once

// HeadMainloop: loads hidden rows and weight rows into shared memory; CUTLASS multiplies them.
//
// Idea      A CUTLASS collective with its own producer, for two reasons. A hidden row may consist
//           of several splits, one after another along K; the weight is then read once per split.
//           And when only one cluster reads a weight tile, the weight need not stay in the
//           second-level cache.
// Work      One elected thread of the producer warp issues the TMA loads.
// Traffic   Each step of 64 along K reads 128 bytes per row and per column of the block tile;
//           blocks of a cluster share one load of the weight.
// Source    Our own, derived from CUTLASS's warp-specialised TMA mainloop.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"

namespace logprobd::kernels::internal {

template <class Base>
struct HeadMainloop : Base {
  using typename Base::GmemTiledCopyA;
  using typename Base::GmemTiledCopyB;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::SmemLayoutA;
  using typename Base::SmemLayoutB;
  using typename Base::TensorStorage;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;

  static_assert(cute::size<1>(ClusterShape{}) == 1, "hidden rows are not multicast");
  static_assert(cute::is_same_v<GmemTiledCopyA, cute::SM90_TMA_LOAD>);

  struct Arguments : Base::Arguments {
    int32_t weight_depth =
        0;  ///< K of the weight; the problem's K counts all splits of a hidden row.
    bool reads_weight_once = false;  ///< True when only one cluster reads each weight tile.
  };
  struct Params : Base::Params {
    int32_t num_row_tiles = 0;
    int32_t weight_steps = 0;  ///< Steps along K of the weight.
    cute::TMA::CacheHintSm90 hidden_hint;
    cute::TMA::CacheHintSm90 weight_hint;
  };

  template <class Problem>
  static constexpr Params to_underlying_arguments(const Problem& problem,
                                                  const Arguments& arguments, void* workspace) {
    constexpr int32_t kStep = cute::size<2>(typename Base::TileShape{});
    Problem weight_problem = problem;
    cute::get<2>(weight_problem) = arguments.weight_depth;
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(problem, arguments, workspace);
    params.tma_load_b =
        Base::to_underlying_arguments(weight_problem, arguments, workspace).tma_load_b;
    constexpr int32_t kRows = cute::size<0>(typename Base::TileShape{});
    params.num_row_tiles = (cute::get<0>(problem) + kRows - 1) / kRows;
    params.weight_steps = (arguments.weight_depth + kStep - 1) / kStep;
    using Hint = cute::TMA::CacheHintSm90;
    params.hidden_hint = arguments.reads_weight_once ? Hint::EVICT_LAST : Hint::EVICT_NORMAL;
    params.weight_hint = arguments.reads_weight_once ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL;
    return params;
  }

  /// Fills one stage after another as the consumers free them; one elected thread does the work.
  template <class HiddenTensor, class WeightTensor, class StepIterator, class Coordinate>
  CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline, PipelineState write,
                           const cute::tuple<HiddenTensor, WeightTensor>& inputs,
                           const Coordinate& coordinate, StepIterator step, int num_steps,
                           int /*thread*/, uint32_t block_rank, TensorStorage& storage) {
    using namespace cute;
    using BarrierType = typename MainloopPipeline::ProducerBarrierType;
    if (elect_one_sync() == 0) return;
    Tensor hidden_stages = make_tensor(make_smem_ptr(storage.smem_A.data()), SmemLayoutA{});
    Tensor weight_stages = make_tensor(make_smem_ptr(storage.smem_B.data()), SmemLayoutB{});
    auto [row_tile, column_tile, unused_k, batch] = coordinate;
    auto hidden_copy = params.tma_load_a.get_slice(0);
    auto weight_copy = params.tma_load_b.get_slice(block_rank);
    // A block beyond the last row loads rows of another block: TMA takes longer to fill a box that
    // lies outside the tensor than to load one from the second-level cache.
    const int32_t readable_tile = min(static_cast<int32_t>(row_tile), params.num_row_tiles - 1);
    Tensor hidden_from = hidden_copy.partition_S(get<0>(inputs)(_, _, readable_tile, _, batch));
    Tensor hidden_to = hidden_copy.partition_D(hidden_stages);
    Tensor weight_from = weight_copy.partition_S(get<1>(inputs)(_, _, column_tile, _, batch));
    Tensor weight_to = weight_copy.partition_D(weight_stages);
    constexpr bool kMulticasts = is_same_v<GmemTiledCopyB, SM90_TMA_LOAD_MULTICAST>;
    constexpr auto kAllBlocks = static_cast<uint16_t>(
        kMulticasts ? (1U << static_cast<unsigned>(size<0>(ClusterShape{}))) - 1U : 0U);

    int32_t weight_step = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; num_steps > 0; --num_steps, ++step, ++write) {
      pipeline.producer_acquire(write);
      BarrierType* const barrier = pipeline.producer_get_barrier(write);
      const int stage = write.index();
      copy(params.tma_load_a.with(*barrier, 0, params.hidden_hint), hidden_from(_, _, _, *step),
           hidden_to(_, _, _, stage));
      copy(params.tma_load_b.with(*barrier, kAllBlocks, params.weight_hint),
           weight_from(_, _, _, weight_step), weight_to(_, _, _, stage));
      if (++weight_step == params.weight_steps) weight_step = 0;
    }
  }
};

}  // namespace logprobd::kernels::internal
