// Kernels for AVX2 with FMA and F16C.

#include "kernels/cpu/fp32_dots_inl.h"
#include "kernels/cpu/tile_stats_inl.h"
#include "kernels/cpu/vector_avx2.h"

namespace logprobd::kernels::internal {
namespace {

using V = Avx2Vector;

void TileDots(const TileDotsParams& params) {
  if (params.num_rows == 1) return DirectDots<V, 4, 1, 12>(params);
  if (params.num_rows == 2) return DirectDots<V, 4, 2, 6>(params);
  if (params.num_rows <= 4) return DirectDots<V, 4, 4, 3>(params);
  PanelDots<V, 4, 3>(params);
}

}  // namespace

const DotKernel& Avx2Dots() {
  static constexpr DotKernel kKernel = {4, PackedRowBytesF32, PackRowsF32<V, 4>, TileDots};
  return kKernel;
}

void TileStatsAvx2(const CpuTileStatsParams& params) { TileStats<V>(params); }

}  // namespace logprobd::kernels::internal
