#include "kernels/torch_ops/api/argument_checks.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <mutex>
#include <set>
#include <string>

namespace logprobd::torch_ops {
namespace {

bool IsDtypeSupported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

}  // namespace

void CheckOnDevice(const MaybeTensor& tensor, const char* name, const at::Tensor& reference,
                   const char* reference_name) {
  TORCH_CHECK_VALUE(!tensor.has_value() || tensor->device() == reference.device(), name, " is on ",
                    tensor->device(), ", but ", reference_name, " is on ", reference.device(),
                    ": both must be on the same device");
}

void CheckFloatingPoint(const MaybeTensor& tensor, const std::string& name) {
  TORCH_CHECK_VALUE(!tensor.has_value() || tensor->is_floating_point(), name, " is ",
                    tensor->scalar_type(), ": it must have a floating-point dtype");
}

void CheckHead(const std::string& prefix, const at::Tensor& hidden, const at::Tensor& weight,
               int64_t rows_min) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) >= rows_min && weight.size(1) > 0, prefix,
                    "weight has the shape ", weight.sizes(),
                    ": it must be [vocabulary, hidden size] and complete; gather the weight "
                    "first when its parameters are sharded");
  TORCH_CHECK_VALUE(hidden.dim() >= 1 && hidden.size(-1) == weight.size(1), prefix,
                    "hidden has the shape ", hidden.sizes(), " but ", prefix,
                    "weight has the shape ", weight.sizes(),
                    ": their last dimensions must be equal");
  TORCH_CHECK_VALUE(
      IsDtypeSupported(hidden.scalar_type()) && IsDtypeSupported(weight.scalar_type()), prefix,
      "hidden is ", hidden.scalar_type(), " and ", prefix, "weight is ", weight.scalar_type(),
      ": float32, bfloat16, float16 and float64 are supported");
}

void CheckPerColumn(const std::string& prefix, const char* name, const MaybeTensor& tensor,
                    const at::Tensor& weight) {
  if (!tensor.has_value()) return;
  TORCH_CHECK_VALUE(tensor->dim() == 1 && tensor->size(0) == weight.size(0), prefix, name,
                    " has the shape ", tensor->sizes(), " but ", prefix, "weight has ",
                    weight.size(0), " rows: the shape must be [", weight.size(0), "]");
  CheckFloatingPoint(tensor, prefix + name);
}

void CheckSoftcap(const std::string& prefix, double softcap) {
  TORCH_CHECK_VALUE(softcap >= 0 && std::isfinite(softcap), prefix, "softcap is ", softcap,
                    ": it must be above 0, or None for no cap");
}

void CheckTemperature(double temperature) {
  TORCH_CHECK_VALUE(temperature > 0 && std::isfinite(temperature), "temperature is ", temperature,
                    ": it must be above 0 and finite");
}

void CheckRowTemperatures(const at::Tensor& temperatures, const at::Tensor& is_computed) {
  CheckFloatingPoint(temperatures, "temperature");
  // Reading a value on a GPU would wait for the GPU.
  if (!temperatures.is_cpu()) return;
  at::Tensor is_bad = temperatures.gt(0).logical_and_(temperatures.isfinite()).logical_not_();
  if (is_computed.defined()) is_bad.logical_and_(is_computed);
  if (!is_bad.any().item<bool>()) return;
  const auto row = is_bad.reshape({-1}).to(at::kByte).argmax().item<int64_t>();
  TORCH_CHECK_VALUE(false, "temperature of row ", row, " is ",
                    temperatures.reshape({-1})[row].item<double>(),
                    ": it must be above 0 and finite, except in rows that are ignored");
}

void WarnOfSlowInputs(const std::string& message) {
  static std::mutex mutex;
  static std::set<std::string> known;
  {
    const std::lock_guard lock(mutex);
    if (!known.insert(message).second) return;
  }
  TORCH_WARN(message);
}

}  // namespace logprobd::torch_ops
