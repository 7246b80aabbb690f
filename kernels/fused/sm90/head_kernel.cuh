#pragma once

// HeadKernel: CUTLASS's GEMM kernel with our mainloops (*_mainloop.cuh), epilogue and scheduler.
//
// Every difference between two instances must be a template argument of HeadKernel. If two source
// files defined kernels with the same mangled name, the linker would keep one and use it for both.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cutlass/bfloat16.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/half.h"
#include "kernels/common/dtype.h"
#include "kernels/common/overlapped_launch.cuh"
#include "kernels/fused/choice.h"
#include "kernels/fused/params.h"
#include "kernels/fused/sm90/head_mainloop.cuh"
#include "kernels/fused/sm90/row_scheduler.cuh"
#include "kernels/fused/sm90/swapped_mainloop.cuh"

#ifdef CUTLASS_ENABLE_GDC_FOR_SM90
#error "CUTLASS would start the next kernel early, see RowScheduler and overlapped_launch.cuh"
#endif

namespace logprobd::kernels::internal {

/// Assembles the types of one kernel.
template <FusedTile kTile, Dtype kDtype, class EpilogueOp>
struct HeadKernel {
  static_assert(kDtype != Dtype::kF32);
  using Element = cute::conditional_t<kDtype == Dtype::kBf16, cutlass::bfloat16_t, cutlass::half_t>;
  static constexpr bool kSwapped = IsSwapped(kTile);
  using Rows = cute::Int<TileRows(kTile)>;
  using Columns = cute::Int<kTileColumns>;
  using RowBlocks = cute::Int<ClusterRows(kTile) / TileRows(kTile)>;
  using ColumnBlocks = cute::Int<ClusterColumnTiles(kTile)>;
  using BlockShape =
      cute::conditional_t<kSwapped, cute::Shape<Columns, Rows, cute::Int<kSplitAlignment>>,
                          cute::Shape<Rows, Columns, cute::Int<kSplitAlignment>>>;
  using ClusterShape = cute::conditional_t<kSwapped, cute::Shape<ColumnBlocks, RowBlocks, cute::_1>,
                                           cute::Shape<RowBlocks, ColumnBlocks, cute::_1>>;
  using Schedule = cute::conditional_t<kTile == FusedTile::k256Cooperative,
                                       cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                                       cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  static constexpr int kAlignment = 8;  // elements, 16 bytes
  using Epilogue = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<EpilogueOp>;
  using Collective = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor,
      kAlignment, Element, cutlass::layout::ColumnMajor, kAlignment, float, BlockShape,
      ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      Schedule>::CollectiveOp;
  // Only the chosen mainloop is instantiated: each asserts its own cluster shape.
  template <bool kIsSwapped, class Base>
  struct MainloopOf {
    using Type = HeadMainloop<Base>;
  };
  template <class Base>
  struct MainloopOf<true, Base> {
    using Type = SwappedMainloop<Base>;
  };
  using Mainloop = typename MainloopOf<kSwapped, Collective>::Type;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int32_t, int32_t, int32_t, int32_t>,
                                           Mainloop, Epilogue, RowSchedulerTag<kSwapped ? 1 : 0>>;
};

/// Enqueues the products of the operands in `params`, which must have been checked. The epilogue
/// processes the results.
template <FusedTile kTile, Dtype kDtype, class EpilogueOp>
cudaError_t LaunchHeadKernel(const FusedPartialsParams& params, const FusedChoice& choice,
                             const typename EpilogueOp::Arguments& epilogue, cudaStream_t stream) {
  using Instance = HeadKernel<kTile, kDtype, EpilogueOp>;
  using Element = typename Instance::Element;
  using Kernel = typename Instance::Kernel;
  int device = 0;
  int num_sms = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error =
          cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  constexpr int64_t kRows = TileRows(kTile);
  const int64_t whole_rows = (params.num_rows + kRows - 1) / kRows * kRows;
  const auto rows =
      static_cast<int32_t>(whole_rows <= params.readable_rows ? whole_rows : params.num_rows);
  const int64_t last_column = params.tile_end * kTileColumns < params.vocab_size
                                  ? params.tile_end * kTileColumns
                                  : params.vocab_size;
  const auto columns = static_cast<int32_t>(last_column - params.tile_begin * kTileColumns);
  const auto depth = static_cast<int32_t>(params.num_splits == 1
                                              ? params.hidden_size
                                              : params.num_splits * SplitPitch(params.hidden_size));

  typename Kernel::Arguments arguments;
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  if constexpr (Instance::kSwapped) {
    arguments.problem_shape = {columns, rows, depth, 1};
    arguments.mainloop.ptr_A = static_cast<const Element*>(params.weight);
    arguments.mainloop.dA = {params.weight_stride, cute::_1{}, 0};
    arguments.mainloop.ptr_B = static_cast<const Element*>(params.hidden);
    arguments.mainloop.dB = {params.hidden_stride, cute::_1{}, 0};
  } else {
    arguments.problem_shape = {rows, columns, depth, 1};
    arguments.mainloop.ptr_A = static_cast<const Element*>(params.hidden);
    arguments.mainloop.dA = {params.hidden_stride, cute::_1{}, 0};
    arguments.mainloop.ptr_B = static_cast<const Element*>(params.weight);
    arguments.mainloop.dB = {params.weight_stride, cute::_1{}, 0};
  }
  arguments.mainloop.weight_depth = static_cast<int32_t>(params.hidden_size);
  arguments.mainloop.reads_weight_once =
      params.num_splits == 1 && params.num_rows <= ClusterRows(kTile);
  arguments.mainloop.keeps_rows = choice.raster == FusedRaster::kAlongVocab;
  arguments.epilogue = epilogue;
  arguments.hw_info.device_id = device;
  arguments.hw_info.sm_count = num_sms;
  arguments.scheduler.num_rows = params.row_count;
  arguments.scheduler.max_swizzle_size = choice.swizzle;
  using Order = decltype(arguments.scheduler.raster_order);
  arguments.scheduler.raster_order =
      (choice.raster == FusedRaster::kAlongRows) != Instance::kSwapped ? Order::AlongM
                                                                       : Order::AlongN;

  const typename Kernel::Params kernel_params = Kernel::to_underlying_arguments(arguments, nullptr);
  if constexpr (Instance::kSwapped) {
    if (!kernel_params.mainloop.is_valid) return cudaErrorInvalidValue;
  }
  const auto kernel = cutlass::device_kernel<Kernel>;
  if (const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attributes[] = {{}, OverlapAttribute()};
  cudaLaunchAttribute& cluster = attributes[0];
  cluster.id = cudaLaunchAttributeClusterDimension;
  using ClusterShape = typename Instance::ClusterShape;
  cluster.val.clusterDim = {cute::size<0>(ClusterShape{}), cute::size<1>(ClusterShape{}), 1};
  cudaLaunchConfig_t config{};
  config.gridDim = Kernel::get_grid_shape(kernel_params);
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, kernel_params);
}

}  // namespace logprobd::kernels::internal
