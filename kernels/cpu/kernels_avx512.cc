// Kernels for AVX-512.

#include "kernels/cpu/fp32_dots_inl.h"
#include "kernels/cpu/tile_stats_inl.h"
#include "kernels/cpu/vector_avx512.h"

namespace logprobd::kernels::internal {
namespace {

using V = Avx512Vector;

void TileDots(const TileDotsParams& params) {
  if (params.num_rows == 1) return DirectDots<V, 8, 1, 12>(params);
  if (params.num_rows == 2) return DirectDots<V, 8, 2, 6>(params);
  if (params.num_rows <= 4) return DirectDots<V, 8, 4, 6>(params);
  if (params.num_rows <= 8) return DirectDots<V, 8, 8, 3>(params);
  PanelDots<V, 8, 3>(params);
}

}  // namespace

const DotKernel& Avx512Dots() {
  static constexpr DotKernel kKernel = {8, PackedRowBytesF32, PackRowsF32<V, 8>, TileDots};
  return kKernel;
}

void TileStatsAvx512(const CpuTileStatsParams& params) { TileStats<V>(params); }

}  // namespace logprobd::kernels::internal
