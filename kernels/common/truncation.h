#pragma once

#include <cstdint>

namespace logprobd::kernels {

/// Hopper's tensor cores cut bits off when they add products to a sum, so dot products come out
/// closer to zero than they are: by this much for each product, relative, on average. With it the
/// mean error on independent data all but vanishes, at hidden sizes of 896 to 4,096, small and
/// large logits alike (H200; tests/bench/results/gpu_errors.json has the errors with it and
/// without).
inline constexpr double kTruncationPerProduct = 9.35e-10;

/// What logits made of sums of `hidden_size` products are multiplied by to take that back. Where
/// the large products come last, less was cut off and this adds as much as it would have removed;
/// where they come first, twice as much was, and half of it is removed (DECISIONS.md).
constexpr double TruncationCorrection(int64_t hidden_size) {
  return 1.0 + kTruncationPerProduct * static_cast<double>(hidden_size);
}

}  // namespace logprobd::kernels
