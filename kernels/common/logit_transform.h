#pragma once

namespace logprobd::kernels {

/// How a head turns a dot product into a logit: z = cap(scale * (h . w) + bias), with
/// cap(x) = softcap * tanh(x / softcap) where softcap > 0. The bias, if any, is an array beside it.
struct LogitTransform {
  float scale = 1.0F;
  float softcap = 0.0F;  ///< 0: none.

  /// Whether scale and cap leave a dot product as it is.
  constexpr bool IsIdentity() const { return scale == 1.0F && softcap <= 0.0F; }
};

}  // namespace logprobd::kernels
