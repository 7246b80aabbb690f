// Tests the AVX512-BF16 kernel with its one instruction emulated by AVX-512, so that packing,
// addressing and remainders are tested on CPUs without it. tile_kernels_test tests the real
// instruction.

#include <immintrin.h>  // included before a macro below replaces one of its names

#include <cstdint>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_isa.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/tile_kernels.h"
#include "tests/unit/kernels/cpu/dot_kernel_checks.h"

// Only the code below may use AVX-512; the rest of this file runs on any CPU.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")

namespace {

inline __m512 EmulatedDotProducts(__m512 sums, __m512bh left, __m512bh right) {
  const __m512i a = (__m512i)left;
  const __m512i b = (__m512i)right;
  const __m512i odd = _mm512_set1_epi32(-65536);
  sums = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, odd)),
                         _mm512_castsi512_ps(_mm512_and_si512(b, odd)), sums);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                         _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sums);
}

}  // namespace

#define _mm512_dpbf16_ps EmulatedDotProducts
#define Avx512Bf16Dots EmulatedAvx512Bf16Dots
namespace logprobd::kernels::internal {
const DotKernel& EmulatedAvx512Bf16Dots();
}  // namespace logprobd::kernels::internal
#include "kernels/cpu/kernels_avx512_bf16.cc"
#pragma GCC pop_options

namespace logprobd::kernels {
namespace {

TEST(EmulatedAvx512Bf16Test, DotProductsAreExactAndDoNotDependOnOtherRows) {
  if (!CpuIsaRuns(CpuIsa::kAvx512)) GTEST_SKIP() << "this CPU has no AVX-512";

  testing::CheckDotKernel(internal::EmulatedAvx512Bf16Dots(), Dtype::kBf16, Dtype::kBf16);
}

}  // namespace
}  // namespace logprobd::kernels
