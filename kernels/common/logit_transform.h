#pragma once

#include <cstdint>

namespace logprobd::kernels {

/// Parameters by which a head turns a dot product into a logit: z = cap(scale * (h . w) + bias),
/// where cap(x) = softcap * tanh(x / softcap) if softcap > 0 and cap(x) = x otherwise. The optional
/// bias is a separate array.
struct LogitTransform {
  float scale = 1.0F;
  float softcap = 0.0F;  ///< 0 disables the cap.

  /// Returns true if scale and cap leave every dot product unchanged.
  constexpr bool IsIdentity() const { return scale == 1.0F && softcap <= 0.0F; }
};

/// Average relative loss of a dot product per accumulated product on Hopper: its tensor cores
/// truncate when they add products to a sum, so computed dot products are closer to zero than the
/// exact ones. With this correction the mean error on independent data nearly vanishes, for hidden
/// sizes of 896 to 4,096 and for small and large logits (H200; tests/bench/results/gpu_errors.json
/// has the errors with and without it).
inline constexpr double kTruncationPerProduct = 9.35e-10;

/// Major compute capability of the GPUs on which this loss was measured. The dot products of other
/// GPUs are not corrected.
inline constexpr int kTruncationMajor = 9;

/// Returns the factor that corrects logits for the truncation of dot products of `hidden_size`
/// terms. The true loss depends on the order of the products' magnitudes: if the large products
/// come last, less is truncated and the factor adds as much error as it would otherwise remove; if
/// they come first, twice as much is truncated and the factor removes half of it (DECISIONS.md).
constexpr double TruncationCorrection(int64_t hidden_size) {
  return 1.0 + kTruncationPerProduct * static_cast<double>(hidden_size);
}

}  // namespace logprobd::kernels
