#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

/// Constants of the gradient of a loss with respect to one row's dot products. With z the row's
/// logits, u_j = log2_scale z_j - log2_sum and t the target:
///   d_j = (2^u_j (free + weighted u_j) + target [j = t] + mean w_j) (1 - (z_j / softcap)^2)
/// where w are the weights of the mean logit; the last factor applies only to heads with a softcap.
/// 2^u_j is the softmax p_j up to the rounding error of log2_sum, for which `free` and `weighted`
/// compensate.
struct alignas(16) RowGradient {
  float log2_scale;
  float log2_sum;
  float free;
  float weighted;
  float target;
  /// Column of the target, counted in the shard. It is outside the shard if another shard holds the
  /// target.
  int32_t target_column;
  float mean;
  /// Column of the row's largest logit in the shard, or -1. The forward pass caches this logit and
  /// the target's in fp32 and all others in 16 bits: where a probability is close to 1, its
  /// gradient would otherwise consist of rounding error.
  int32_t max_column;
  float target_exponent;  ///< u of the target, in fp32.
  float max_exponent;     ///< u of max_column, in fp32.
};

/// Lower bound of u_j in the formula. At this bound 2^u_j is 0 and u_j is finite, so their product
/// is 0.
inline constexpr float kGradientExponentMin = -200.0F;

/// Gradients of the loss with respect to a row's scores, grouped by the terms of the formula below.
struct RowUpstream {
  double free = 0;     ///< d_lse - d_logprob
  double entropy = 0;  ///< d_entropy
  double target = 0;   ///< d_logprob
  double mean = 0;     ///< d_mean_logit
};

/// Returns the constants of a row. `lse` is exact, in nats; `entropy` is H, in nats; `log2_scale`
/// is Log2Scale of the row's temperature; `gradient_scale` is dx/d(dot) without a cap, which is
/// scale / temperature. Both columns are set to -1 and both exponents to 0. With x = z /
/// temperature, the formula is:
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
