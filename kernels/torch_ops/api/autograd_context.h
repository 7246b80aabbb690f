#pragma once

// What the operators' autograd functions have in common: saved options, and checks of constants.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <type_traits>

#include "kernels/torch_ops/api/linear_logprob.h"
#include "kernels/torch_ops/api/signatures.h"

namespace logprobd::torch_ops {

template <HasFields Options>
void SaveOptions(const Options& options, torch::autograd::AutogradContext& context) {
  ForEachField<Options>([&](const auto& field) {
    const auto& value = options.*field.member;
    if constexpr (std::is_enum_v<std::remove_cvref_t<decltype(value)>>) {
      context.saved_data[field.name] = static_cast<int64_t>(value);
    } else {
      context.saved_data[field.name] = value;
    }
  });
}

template <HasFields Options>
Options SavedOptions(torch::autograd::AutogradContext& context) {
  Options options;
  ForEachField<Options>([&](const auto& field) {
    auto& value = options.*field.member;
    using T = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_enum_v<T>) {
      value = static_cast<T>(context.saved_data[field.name].toInt());
    } else {
      value = context.saved_data[field.name].template to<T>();
    }
  });
  return options;
}

/// Returns whether a backward pass may compute the gradient of `input`. Must be called before
/// autograd::Function, which switches the recording of gradients off.
inline bool NeedsGradient(const MaybeTensor& input) {
  return at::GradMode::is_enabled() && input.has_value() && input->requires_grad();
}

/// Throws a c10::ValueError that names the tensor if NeedsGradient.
inline void CheckNeedsNoGradient(const MaybeTensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(!NeedsGradient(tensor), name,
                    " requires a gradient, but none is computed for it: detach it");
}

inline MaybeTensor IfDefined(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

}  // namespace logprobd::torch_ops
