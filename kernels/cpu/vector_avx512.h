#pragma once

// Avx512Vector: sixteen floats in an AVX-512 register. A vector type is a struct of static
// functions and a template argument of the *_inl.h files; vector_avx2.h and vector_generic.h define
// the same functions.

#include <immintrin.h>

#include <cstdint>

namespace logprobd::kernels {
namespace {

struct Avx512Vector {
  using Float = __m512;
  static constexpr int kLanes = 16;

  static Float Set(float value) { return _mm512_set1_ps(value); }
  static Float Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, Float value) { _mm512_storeu_ps(to, value); }
  /// Loads kLanes pairs of bf16 values: the first of each pair into `even`, the second into `odd`.
  static void LoadPairs(const uint16_t* from, Float& even, Float& odd) {
    const __m512i pairs = _mm512_loadu_si512(from);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
  }
  static Float LoadHalf(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static float HalfToFloat(uint16_t bits) { return _cvtsh_ss(bits); }
  static Float Add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float Sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float Mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float Div(Float a, Float b) { return _mm512_div_ps(a, b); }
  /// Returns a * b + c, rounded once or twice, but always in the same way.
  static Float MulAdd(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  /// Returns a * b + c with one rounding: the product is exact.
  static Float MulAddOnce(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  /// Returns the larger value, or b if either is NaN. Min returns the smaller value, likewise.
  static Float Max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static Float Min(Float a, Float b) { return _mm512_min_ps(a, b); }
  static Float Abs(Float a) { return _mm512_abs_ps(a); }
  /// Returns `magnitude`, which is >= 0, with the sign of `sign`.
  static Float CopySign(Float magnitude, Float sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(_mm512_set1_ps(-0.0F), sign));
  }
  /// Rounds to the nearest integer; |a| must be less than 2^22.
  static Float Round(Float a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Float SelectLess(Float a, Float b, Float then, Float otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
  }
  /// Returns p * 2^n for an integer n.
  static Float Scale(Float p, Float n) { return _mm512_scalef_ps(p, n); }
  /// Reduces each vector over its lanes; lane r of the result belongs to rows[r].
  static Float ReduceAddRows(const Float (&rows)[kLanes]) {
    return ReduceRows(rows, [](Float a, Float b) { return _mm512_add_ps(a, b); });
  }
  static Float ReduceMaxRows(const Float (&rows)[kLanes]) {
    return ReduceRows(rows, [](Float a, Float b) { return _mm512_max_ps(a, b); });
  }
  /// Returns a mask whose bit i is set if a and b are equal in lane i.
  static uint32_t EqualMask(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }

 private:
  /// Each step combines two vectors into one. The rows of each of the two take half of its lanes.
  template <class Op>
  static Float ReduceRows(const Float (&rows)[kLanes], Op op) {
    Float pairs[8];
    for (int i = 0; i < 8; ++i) {
      const Float a = rows[2 * i];
      const Float b = rows[2 * i + 1];
      pairs[i] = op(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
    }
    Float fours[4];
    for (int i = 0; i < 4; ++i) {
      const Float a = pairs[2 * i];
      const Float b = pairs[2 * i + 1];
      fours[i] = op(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
    }
    // Each 128-bit quarter holds a quarter of the lanes of four rows.
    Float eights[2];
    for (int i = 0; i < 2; ++i) {
      const Float a = fours[2 * i];
      const Float b = fours[2 * i + 1];
      eights[i] = op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    }
    return op(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
              _mm512_shuffle_f32x4(eights[0], eights[1], 0xDD));
  }
};

}  // namespace
}  // namespace logprobd::kernels
