#pragma once

// Avx2Vector: eight floats in an AVX2 register, with FMA and F16C. vector_avx512.h documents the
// functions.

#include <immintrin.h>

#include <cstdint>

namespace logprobd::kernels {
namespace {

struct Avx2Vector {
  using Float = __m256;
  static constexpr int kLanes = 8;

  static Float Set(float value) { return _mm256_set1_ps(value); }
  static Float Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, Float value) { _mm256_storeu_ps(to, value); }
  static void LoadPairs(const uint16_t* from, Float& even, Float& odd) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
  }
  static Float LoadHalf(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static float HalfToFloat(uint16_t bits) { return _cvtsh_ss(bits); }
  static Float Add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float Sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float Mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float Div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float MulAdd(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float MulAddOnce(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float Max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static Float Min(Float a, Float b) { return _mm256_min_ps(a, b); }
  static Float Abs(Float a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), a); }
  static Float CopySign(Float magnitude, Float sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(_mm256_set1_ps(-0.0F), sign));
  }
  static Float Round(Float a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Float SelectLess(Float a, Float b, Float then, Float otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static Float Scale(Float p, Float n) {
    const __m256i exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
  }
  static Float ReduceAddRows(const Float (&rows)[kLanes]) {
    return ReduceRows(rows, [](Float a, Float b) { return _mm256_add_ps(a, b); });
  }
  static Float ReduceMaxRows(const Float (&rows)[kLanes]) {
    return ReduceRows(rows, [](Float a, Float b) { return _mm256_max_ps(a, b); });
  }
  static uint32_t EqualMask(Float a, Float b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
  }

 private:
  /// Works as in vector_avx512.h: each step halves the number of vectors and doubles the number of
  /// rows per vector.
  template <class Op>
  static Float ReduceRows(const Float (&rows)[kLanes], Op op) {
    Float pairs[4];
    for (int i = 0; i < 4; ++i) {
      const Float a = rows[2 * i];
      const Float b = rows[2 * i + 1];
      pairs[i] = op(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
    }
    Float fours[2];
    for (int i = 0; i < 2; ++i) {
      const Float a = pairs[2 * i];
      const Float b = pairs[2 * i + 1];
      fours[i] = op(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
    }
    // Each 128-bit half holds half of the lanes of rows 0 to 3, or 4 to 7.
    return op(_mm256_permute2f128_ps(fours[0], fours[1], 0x20),
              _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
  }
};

}  // namespace
}  // namespace logprobd::kernels
