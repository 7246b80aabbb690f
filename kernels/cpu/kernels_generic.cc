// Kernels for any CPU.

#include "kernels/cpu/fp32_dots_inl.h"
#include "kernels/cpu/tile_stats_inl.h"
#include "kernels/cpu/vector_generic.h"

namespace logprobd::kernels::internal {
namespace {

using V = GenericVector;

void TileDots(const TileDotsParams& params) {
  if (params.num_rows == 1) return DirectDots<V, 4, 1, 8>(params);
  if (params.num_rows == 2) return DirectDots<V, 4, 2, 4>(params);
  if (params.num_rows <= 4) return DirectDots<V, 4, 4, 2>(params);
  PanelDots<V, 4, 2>(params);
}

}  // namespace

const DotKernel& GenericDots() {
  static constexpr DotKernel kKernel = {4, PackedRowBytesF32, PackRowsF32<V, 4>, TileDots};
  return kKernel;
}

void TileStatsGeneric(const CpuTileStatsParams& params) { TileStats<V>(params); }

}  // namespace logprobd::kernels::internal
