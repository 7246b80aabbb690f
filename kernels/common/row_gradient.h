#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

/// What the gradient of a loss with respect to one row's dot products takes. With z the row's
/// logits, u_j = log2_scale z_j - log2_sum (p_j = 2^u_j is the softmax, but for what rounding took
/// from log2_sum: `free` and `weighted` make up for it) and t the target:
///   d_j = (2^u_j (free + weighted u_j) + target [j = t] + mean w_j) dz_j/d(dot_j)
/// where w are the weights of the mean logit, and the factor of a softcap, 1 - (z_j / softcap)^2,
/// is all that is not in the constants yet.
struct alignas(16) RowGradient {
  float log2_scale;
  float log2_sum;
  float free;
  float weighted;
  float target;
  int32_t target_column;  ///< In the shard; outside of it where the shard does not have it.
  float mean;
  /// Column of the row's largest logit in the shard, or -1. It and the target are known in fp32
  /// where the others were kept in 16 bits: near 1, a probability's rounding is all there is to
  /// see.
  int32_t max_column;
  float target_exponent;  ///< u of the target.
  float max_exponent;     ///< u of max_column.
};

/// u_j from which down 2^u_j is 0, and finite, so that its product with 0 is.
inline constexpr float kGradientExponentMin = -200.0F;

/// A row's gradients of the loss, as they weigh the terms of the gradient below.
struct RowUpstream {
  double free = 0;     ///< d_lse - d_logprob
  double entropy = 0;  ///< d_entropy
  double target = 0;   ///< d_logprob
  double mean = 0;     ///< d_mean_logit
};

/// The constants of a row at `log2_scale` (Log2Scale of its temperature), whose exact lse, in nats,
/// and entropy H are given; `gradient_scale` is d(x)/d(dot) without a cap: scale / temperature.
/// Columns and exponents are left at none. The formula: with x = z / temperature,
///   dx_j = p_j (free - entropy (ln p_j + H)) + target [j = t] + mean w_j
LOGPROBD_HOST_DEVICE inline RowGradient RowGradientOf(const RowUpstream& upstream, double lse,
                                                      double entropy, float log2_scale,
                                                      double gradient_scale) {
  constexpr double kLog2E = 1.4426950408889634;
  const double exact_sum = lse * kLog2E;
  RowGradient row{};
  row.log2_scale = log2_scale;
  row.log2_sum = static_cast<float>(exact_sum);
  // With v = u of the rounded sum: u = v - rest, so 2^u (a + b u) = 2^v 2^-rest (a - b rest + b v).
  const double rest = exact_sum - static_cast<double>(row.log2_sum);
  const double factor = exp2(-rest) * gradient_scale;
  const double weighted = -upstream.entropy / kLog2E;
  const double free = upstream.free - upstream.entropy * entropy;
  row.free = static_cast<float>((free - weighted * rest) * factor);
  row.weighted = static_cast<float>(weighted * factor);
  row.target = static_cast<float>(upstream.target * gradient_scale);
  row.mean = static_cast<float>(upstream.mean * gradient_scale);
  row.target_column = -1;
  row.max_column = -1;
  return row;
}

}  // namespace logprobd::kernels
