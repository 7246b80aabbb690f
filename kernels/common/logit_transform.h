#pragma once

namespace logprobd::kernels {

/// How a head turns a dot product into a logit: z = cap(scale * (h . w) + bias), with
/// cap(x) = softcap * tanh(x / softcap) where softcap > 0. The bias, if any, is an array beside it.
struct LogitTransform {
  float scale = 1.0F;
  float softcap = 0.0F;  ///< 0: none.
};

}  // namespace logprobd::kernels
