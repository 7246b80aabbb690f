// Decides which inputs the fused kernels support.

#include "kernels/torch_ops/paths/fused_path.h"

#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDAFunctions.h>

#include <sstream>

#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/params.h"
#include "kernels/torch_ops/paths/kernel_arrays.h"

namespace logprobd::torch_ops {
namespace {

/// Returns whether the device runs fused kernels.
bool HasFusedKernels(at::Device device) {
  const c10::DeviceIndex index = device.has_index() ? device.index() : c10::cuda::current_device();
  return kernels::FusedArchOf(index) != kernels::FusedArch::kNone;
}

/// Returns why the fused kernels do not support these inputs, and a remedy, or an empty string if
/// they do.
std::string FusedObstacle(at::ScalarType hidden, at::ScalarType weight, int64_t hidden_size) {
  std::ostringstream obstacle;
  // Hidden states of other dtypes are split into bf16 values. fp16 has too few exponents for that.
  const bool is_supported =
      (weight == at::kBFloat16 &&
       (hidden == at::kBFloat16 || hidden == at::kHalf || hidden == at::kFloat)) ||
      (weight == at::kHalf && hidden == at::kHalf);
  if (!is_supported) {
    obstacle << "hidden is " << c10::getDtypeNames(hidden).first << " and weight is "
             << c10::getDtypeNames(weight).first << ": ";
    if (hidden == at::kDouble || weight == at::kDouble) {
      obstacle << "cast both to bfloat16 unless the results must be float64";
    } else if (weight == at::kHalf) {
      obstacle << "cast hidden to float16 or the weight to bfloat16";
    } else {
      obstacle << "cast the weight to bfloat16 or run under torch.autocast";
    }
  } else if (hidden_size % kRowAlignment != 0) {
    obstacle << "the hidden size is " << hidden_size << ": pad hidden and weight with zeros to a "
             << "multiple of " << kRowAlignment;
  }
  return obstacle.str();
}

}  // namespace

const ScoringPath* FusedPath::For(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                                  int64_t hidden_size) {
  static const FusedPath path;
  const bool is_supported =
      HasFusedKernels(device) && FusedObstacle(hidden, weight, hidden_size).empty();
  return is_supported ? &path : nullptr;
}

std::string FusedPath::SlowReason(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                                  int64_t hidden_size) {
  return HasFusedKernels(device) ? FusedObstacle(hidden, weight, hidden_size) : std::string();
}

}  // namespace logprobd::torch_ops
