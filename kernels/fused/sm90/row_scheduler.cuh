#pragma once

// RowScheduler: assigns tiles to blocks; the number of rows may be in device memory.
//
// Idea      CUTLASS's persistent scheduler, but the number of rows is read when the kernel runs, so
//           the host need not wait for a number that the GPU computes. tile_order.h has the order.
// Work      Every thread computes its tile itself, once per tile.
// Traffic   8 bytes per tile and thread, from the first-level cache.
// Numerics  None; the order of tiles does not affect any bit.
// Limits    2^31 - 1 tiles.
// Source    Our own, derived from CUTLASS's static persistent scheduler.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/kernel/sm90_tile_scheduler.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "kernels/common/overlapped_launch.cuh"
#include "kernels/fused/sm90/tile_order.h"

namespace logprobd::kernels::internal {

/// A CUTLASS tile scheduler whose clusters extend along the rows or along the columns. Rows are
/// CUTLASS's mode `kRowMode`: 0 for M, 1 for N.
template <int kRowMode, class TileShape, class ClusterShape>
class RowScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 public:
  using typename Base::WorkTileInfo;
  struct Arguments : Base::Arguments {
    const int64_t* num_rows =
        nullptr;  ///< Device memory, at most the problem's rows; null: the problem's rows.
  };
  struct Params : Base::Params {
    const int64_t* num_rows = nullptr;
    uint32_t row_clusters = 0;  ///< Of the problem's rows.
    uint32_t column_clusters = 0;
    uint32_t group_lines_max = 1;  ///< Largest number of lines that are processed together.
  };

  template <class Problem>
  static Params to_underlying_arguments(const Problem& problem, TileShape tile,
                                        ClusterShape cluster,
                                        const cutlass::KernelHardwareInfo& hardware,
                                        const Arguments& arguments, void* workspace = nullptr,
                                        uint32_t epilogue_parts = 1, uint32_t step_alignment = 1) {
    Params params;
    static_cast<typename Base::Params&>(params) = Base::to_underlying_arguments(
        problem, tile, cluster, hardware, arguments, workspace, epilogue_parts, step_alignment);
    params.num_rows = arguments.num_rows;
    params.row_clusters = ClustersOf(static_cast<uint32_t>(cute::get<kRowMode>(problem)));
    params.column_clusters =
        (static_cast<uint32_t>(cute::get<1 - kRowMode>(problem)) + kClusterColumns - 1) /
        kClusterColumns;
    params.group_lines_max = static_cast<uint32_t>(arguments.max_swizzle_size);
    return params;
  }

  CUTLASS_DEVICE explicit RowScheduler(const Params& params) : params_(params) {
#if defined(__CUDA_ARCH__)
    // CUTLASS's kernels make the scheduler in every thread, before the warps take their roles; no
    // thread reads global memory before that.
    WaitForPreviousKernel();
    block_ = params.raster_order_ == Base::RasterOrder::AlongM
                 ? blockIdx.x * gridDim.y + blockIdx.y
                 : blockIdx.x + blockIdx.y * gridDim.x;
    num_blocks_ = gridDim.x * gridDim.y;
#endif
  }

  template <class Cluster>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(Cluster) const {
    return get_current_work();
  }

  CUTLASS_DEVICE WorkTileInfo get_current_work() const {
    const uint32_t row_clusters = params_.num_rows == nullptr
                                      ? params_.row_clusters
                                      : ClustersOf(static_cast<uint32_t>(*params_.num_rows));
    const uint32_t columns = params_.column_clusters;
    const uint32_t cluster = block_ / kClusterBlocks;
    if (cluster >= row_clusters * columns) return WorkTileInfo::invalid_work_tile();
    const TilePosition tile =
        TileAt(cluster, {IsAlongRows() ? columns : row_clusters,
                         IsAlongRows() ? row_clusters : columns, params_.group_lines_max});
    const uint32_t row_cluster = IsAlongRows() ? tile.in_line : tile.line;
    const uint32_t column = IsAlongRows() ? tile.line : tile.in_line;
    const uint32_t rank = block_ % kClusterBlocks;
    const auto row_block =
        static_cast<int32_t>(row_cluster * kRowBlocks + (kRowBlocks > 1 ? rank : 0));
    const auto column_tile =
        static_cast<int32_t>(column * kColumnBlocks + (kColumnBlocks > 1 ? rank : 0));
    return {kRowMode == 1 ? column_tile : row_block, kRowMode == 1 ? row_block : column_tile, 0,
            true};
  }

  /// This function is deleted because the base's version reads members that only the base's
  /// constructor sets.
  CUTLASS_DEVICE bool is_last_tile(const WorkTileInfo&, uint32_t count = 1) const = delete;

  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { block_ += num_blocks_ * count; }

  /// Ignores the pipeline that kernels may pass, which only other schedulers need.
  template <class... Pipeline>
  CUTLASS_DEVICE auto fetch_next_work(const WorkTileInfo&, const Pipeline&...) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }

 private:
  static constexpr uint32_t kRowBlocks = cute::size<kRowMode>(ClusterShape{});
  static constexpr uint32_t kColumnBlocks = cute::size<1 - kRowMode>(ClusterShape{});
  static constexpr uint32_t kClusterBlocks = cute::size(ClusterShape{});
  static constexpr uint32_t kClusterRows = cute::size<kRowMode>(TileShape{}) * kRowBlocks;
  static constexpr uint32_t kClusterColumns = cute::size<1 - kRowMode>(TileShape{}) * kColumnBlocks;
  static_assert(kRowBlocks == 1 || kColumnBlocks == 1);

  /// Returns the number of clusters that process `num_rows` rows.
  CUTLASS_HOST_DEVICE static uint32_t ClustersOf(uint32_t num_rows) {
    return (num_rows + kClusterRows - 1) / kClusterRows;
  }

  CUTLASS_DEVICE bool IsAlongRows() const {
    return params_.raster_order_ ==
           (kRowMode == 1 ? Base::RasterOrder::AlongN : Base::RasterOrder::AlongM);
  }

  const Params& params_;
  uint32_t block_ = 0;
  uint32_t num_blocks_ = 0;
};

/// Tag by which CUTLASS's TileSchedulerSelector finds RowScheduler.
template <int kRowMode>
struct RowSchedulerTag {};

}  // namespace logprobd::kernels::internal

namespace cutlass::gemm::kernel::detail {

template <int kRowMode, class TileShape, class ClusterShape, uint32_t kStages>
struct TileSchedulerSelector<logprobd::kernels::internal::RowSchedulerTag<kRowMode>, arch::Sm90,
                             TileShape, ClusterShape, kStages> {
  using Scheduler = logprobd::kernels::internal::RowScheduler<kRowMode, TileShape, ClusterShape>;
};

}  // namespace cutlass::gemm::kernel::detail
