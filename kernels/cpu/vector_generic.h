#pragma once

// GenericVector holds four floats in a vector type of the compiler and runs on any CPU.
// vector_avx512.h documents the functions.

#include <cstdint>

namespace logprobd::kernels {
namespace {

struct GenericVector {
  using Float = float __attribute__((vector_size(16)));
  using Int = int32_t __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;

  static Float Set(float value) { return Float{value, value, value, value}; }
  static Float Load(const float* from) {
    Float value;
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
  }
  static void Store(float* to, Float value) { __builtin_memcpy(to, &value, sizeof(value)); }
  static void LoadPairs(const uint16_t* from, Float& even, Float& odd) {
    Int pairs;
    __builtin_memcpy(&pairs, from, sizeof(pairs));
    even = reinterpret_cast<Float>(pairs << 16);
    odd = reinterpret_cast<Float>(pairs & static_cast<int32_t>(0xFFFF0000U));
  }
  static float HalfToFloat(uint16_t bits) {
    // Shift the mantissa into position, then correct the exponent's bias by one exact
    // multiplication. Infinities and NaN keep an exponent of all ones.
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7FFFU) << 13;
    float value = 0;
    __builtin_memcpy(&value, &magnitude, sizeof(value));
    value *= 0x1p112F;
    uint32_t word = 0;
    __builtin_memcpy(&word, &value, sizeof(word));
    if ((bits & 0x7C00U) == 0x7C00U) word = 0x7F800000U | magnitude;
    word |= static_cast<uint32_t>(bits & 0x8000U) << 16;
    __builtin_memcpy(&value, &word, sizeof(value));
    return value;
  }
  static Float LoadHalf(const uint16_t* from) {
    return Float{HalfToFloat(from[0]), HalfToFloat(from[1]), HalfToFloat(from[2]),
                 HalfToFloat(from[3])};
  }
  static Float Add(Float a, Float b) { return a + b; }
  static Float Sub(Float a, Float b) { return a - b; }
  static Float Mul(Float a, Float b) { return a * b; }
  static Float Div(Float a, Float b) { return a / b; }
  static Float MulAdd(Float a, Float b, Float c) { return a * b + c; }
  static Float MulAddOnce(Float a, Float b, Float c) {
    // The product is exact in double. The additional rounding of the sum to double is harmless
    // here.
    Float result;
    for (int i = 0; i < kLanes; ++i) {
      result[i] = static_cast<float>(static_cast<double>(a[i]) * static_cast<double>(b[i]) +
                                     static_cast<double>(c[i]));
    }
    return result;
  }
  static Float Max(Float a, Float b) { return a > b ? a : b; }
  static Float Min(Float a, Float b) { return a < b ? a : b; }
  static Float Abs(Float a) {
    return reinterpret_cast<Float>(reinterpret_cast<Int>(a) & 0x7FFFFFFF);
  }
  static Float CopySign(Float magnitude, Float sign) {
    const Int sign_bits = reinterpret_cast<Int>(sign) & static_cast<int32_t>(0x80000000U);
    return reinterpret_cast<Float>(reinterpret_cast<Int>(magnitude) | sign_bits);
  }
  static Float Round(Float a) { return (a + 0x1.8p23F) - 0x1.8p23F; }
  static Float SelectLess(Float a, Float b, Float then, Float otherwise) {
    return a < b ? then : otherwise;
  }
  static Float Scale(Float p, Float n) {
    const Int exponent = (__builtin_convertvector(n, Int) + 127) << 23;
    return p * reinterpret_cast<Float>(exponent);
  }
  static float ReduceAdd(Float a) { return (a[0] + a[1]) + (a[2] + a[3]); }
  static float ReduceMax(Float a) {
    const float low = a[0] > a[1] ? a[0] : a[1];
    const float high = a[2] > a[3] ? a[2] : a[3];
    return low > high ? low : high;
  }
  static Float ReduceAddRows(const Float (&rows)[kLanes]) {
    return Float{ReduceAdd(rows[0]), ReduceAdd(rows[1]), ReduceAdd(rows[2]), ReduceAdd(rows[3])};
  }
  static Float ReduceMaxRows(const Float (&rows)[kLanes]) {
    return Float{ReduceMax(rows[0]), ReduceMax(rows[1]), ReduceMax(rows[2]), ReduceMax(rows[3])};
  }
  static uint32_t EqualMask(Float a, Float b) {
    uint32_t mask = 0;
    for (int i = 0; i < kLanes; ++i) mask |= a[i] == b[i] ? 1U << i : 0U;
    return mask;
  }
};

}  // namespace
}  // namespace logprobd::kernels
