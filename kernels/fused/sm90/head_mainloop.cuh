#pragma once

// HeadMainloop: loads hidden rows and weight rows into shared memory; CUTLASS multiplies them.
//
// Idea      A CUTLASS collective with its own producer, which reads the weight once per split of
//           the hidden rows and passes cache hints (head_loads.cuh).
// Work      One elected thread of the producer warp issues the TMA loads.
// Traffic   Each step of 64 along K reads 128 bytes per row and per column of the block tile;
//           blocks of a cluster share one load of the weight, or one of the hidden rows.
// Source    Our own, derived from CUTLASS's warp-specialised TMA mainloop.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "kernels/fused/sm90/head_loads.cuh"

namespace logprobd::kernels::internal {

template <class Base>
struct HeadMainloop : HeadLoads<Base, 0> {
  using Loads = HeadLoads<Base, 0>;
  using typename Base::GmemTiledCopyA;
  using typename Base::GmemTiledCopyB;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::SmemLayoutA;
  using typename Base::SmemLayoutB;
  using typename Base::TensorStorage;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;

  static constexpr bool kSharesHidden =
      cute::is_same_v<GmemTiledCopyA, cute::SM90_TMA_LOAD_MULTICAST>;
  static constexpr bool kSharesWeight =
      cute::is_same_v<GmemTiledCopyB, cute::SM90_TMA_LOAD_MULTICAST>;
  static_assert(!kSharesHidden || !kSharesWeight, "a cluster has one row or one column of blocks");

  using typename Loads::Arguments;
  using typename Loads::Params;

  template <class Problem>
  static Params to_underlying_arguments(const Problem& problem, const Arguments& arguments,
                                        void* workspace) {
    Problem weight_problem = problem;
    cute::get<2>(weight_problem) = arguments.weight_depth;
    Params params = Loads::to_underlying_arguments(problem, arguments, workspace);
    params.tma_load_b =
        Base::to_underlying_arguments(weight_problem, arguments, workspace).tma_load_b;
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
    auto hidden_copy = params.tma_load_a.get_slice(kSharesHidden ? block_rank : 0);
    auto weight_copy = params.tma_load_b.get_slice(kSharesWeight ? block_rank : 0);
    const int32_t readable_tile = Loads::ReadableTile(params, row_tile);
    Tensor hidden_from = hidden_copy.partition_S(get<0>(inputs)(_, _, readable_tile, _, batch));
    Tensor hidden_to = hidden_copy.partition_D(hidden_stages);
    Tensor weight_from = weight_copy.partition_S(get<1>(inputs)(_, _, column_tile, _, batch));
    Tensor weight_to = weight_copy.partition_D(weight_stages);
    constexpr auto kAllBlocks =
        static_cast<uint16_t>((1U << static_cast<unsigned>(size(ClusterShape{}))) - 1U);
    constexpr uint16_t kHiddenTo = kSharesHidden ? kAllBlocks : 0;
    constexpr uint16_t kWeightTo = kSharesWeight ? kAllBlocks : 0;

    int32_t weight_step = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; num_steps > 0; --num_steps, ++step, ++write) {
      pipeline.producer_acquire(write);
      BarrierType* const barrier = pipeline.producer_get_barrier(write);
      const int stage = write.index();
      copy(params.tma_load_a.with(*barrier, kHiddenTo, params.hidden_hint),
           hidden_from(_, _, _, *step), hidden_to(_, _, _, stage));
      copy(params.tma_load_b.with(*barrier, kWeightTo, params.weight_hint),
           weight_from(_, _, _, weight_step), weight_to(_, _, _, stage));
      if (++weight_step == params.weight_steps) weight_step = 0;
    }
  }
};

}  // namespace logprobd::kernels::internal
