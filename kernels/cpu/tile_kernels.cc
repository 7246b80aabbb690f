#include "kernels/cpu/tile_kernels.h"

namespace logprobd::kernels {

const DotKernel& DotKernelFor(CpuIsa isa, Dtype hidden, Dtype weight) {
#if defined(__x86_64__)
  const bool bf16 = hidden == Dtype::kBf16 && weight == Dtype::kBf16;
  switch (isa) {
    case CpuIsa::kGeneric:
      break;
    case CpuIsa::kAvx2:
      return internal::Avx2Dots();
    case CpuIsa::kAvx512:
      return internal::Avx512Dots();
    case CpuIsa::kAvx512Bf16:
      return bf16 ? internal::Avx512Bf16Dots() : internal::Avx512Dots();
    case CpuIsa::kAmxBf16:
      return bf16 ? internal::AmxBf16Dots() : internal::Avx512Dots();
  }
#else
  (void)isa, (void)hidden, (void)weight;
#endif
  return internal::GenericDots();
}

TileStatsFunction TileStatsFor(CpuIsa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case CpuIsa::kGeneric:
      break;
    case CpuIsa::kAvx2:
      return internal::TileStatsAvx2;
    case CpuIsa::kAvx512:
    case CpuIsa::kAvx512Bf16:
    case CpuIsa::kAmxBf16:
      return internal::TileStatsAvx512;
  }
#else
  (void)isa;
#endif
  return internal::TileStatsGeneric;
}

}  // namespace logprobd::kernels
