#pragma once

#include "kernels/common/host_device.h"
#include "kernels/common/logit_transform.h"

// The numbers by which a GPU multiplies dot products. The service and the PyTorch operator both
// compute them with these functions, so that their scores are bit-identical.

namespace logprobd::kernels {

/// Returns the base-2 scale of a temperature, log2(e) * correction / temperature, rounded once.
LOGPROBD_HOST_DEVICE inline float CorrectedLog2Scale(float temperature, double correction) {
  return static_cast<float>(1.4426950408889634 * correction / static_cast<double>(temperature));
}

/// A head's transform with the correction of dot products (TruncationCorrection), or with the part
/// of it that the transform does not contain.
struct CorrectedTransform {
  LogitTransform transform;
  double correction = 1.0;  ///< Argument of CorrectedLog2Scale; 1 if `transform` contains it.
};

/// Applies `correction` once. If the head changes its dot products, its scale contains the
/// correction, because it must precede bias and cap. Otherwise the scales of temperatures contain
/// it, which costs no instruction.
constexpr CorrectedTransform Corrected(const LogitTransform& transform, bool has_bias,
                                       double correction) {
  if (!has_bias && transform.IsIdentity()) return {transform, correction};
  LogitTransform corrected = transform;
  corrected.scale = static_cast<float>(static_cast<double>(transform.scale) * correction);
  return {corrected, 1.0};
}

}  // namespace logprobd::kernels
