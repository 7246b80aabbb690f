#pragma once

// What the operators' autograd functions have in common: saved options and tensors, checks of
// constants, and the backward pass of a loss.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

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

/// Returns the results of an operator as a list of variables.
template <typename Tuple>
torch::autograd::variable_list ListOf(const Tuple& results) {
  return std::apply([](const auto&... each) { return torch::autograd::variable_list{each...}; },
                    results);
}
template <typename Tuple>
Tuple ToTuple(const torch::autograd::variable_list& variables) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    return Tuple(variables[kIndex]...);
  }
  (std::make_index_sequence<std::tuple_size_v<Tuple>>());
}

/// Returns the tensors of structs one after another; absent tensors are undefined.
template <typename... Structs>
torch::autograd::variable_list ToList(const Structs&... structs) {
  torch::autograd::variable_list tensors;
  const auto append = [&]<typename Struct>(const Struct& from) {
    ForEachField<Struct>([&]<typename T>(const Field<Struct, T>& field) {
      if constexpr (!std::is_same_v<T, bool>) {
        tensors.push_back(MaybeTensor(from.*field.member).value_or(at::Tensor()));
      }
    });
  };
  (append(structs), ...);
  return tensors;
}

/// The inverse of ToList.
template <typename... Structs>
std::tuple<Structs...> FromList(const torch::autograd::variable_list& tensors) {
  std::tuple<Structs...> structs;
  size_t i = 0;
  const auto read = [&]<typename Struct>(Struct& to) {
    ForEachField<Struct>([&]<typename T>(const Field<Struct, T>& field) {
      if constexpr (std::is_same_v<T, MaybeTensor>) {
        to.*field.member = IfDefined(tensors[i++]);
      } else if constexpr (!std::is_same_v<T, bool>) {
        to.*field.member = tensors[i++];
      }
    });
  };
  std::apply([&](auto&... each) { (read(each), ...); }, structs);
  return structs;
}

// autograd::Function differentiates the tensors that `forward` takes directly: hidden, weight and
// bias, in this order, are its first arguments. Tensors inside structs are constants to it.
// `backward` returns one gradient per argument of `forward`; a missing bias has no index in
// needs_input_grad.
inline constexpr size_t kHidden = 0, kWeight = 1, kBias = 2;

/// Key of saved_data: whether `forward` was captured in a CUDA graph.
inline constexpr const char* kIsCaptured = "is_captured";

/// Returns which gradients a backward pass computes.
inline Needs NeedsOf(const torch::autograd::AutogradContext& context, bool has_bias) {
  return {context.needs_input_grad(kHidden), context.needs_input_grad(kWeight),
          has_bias && context.needs_input_grad(kBias)};
}

/// Returns the result of `backward`: one gradient per argument of `forward`, of which those that
/// are not needed are undefined.
inline torch::autograd::variable_list GradientsOfArguments(size_t num_arguments, Needs needs,
                                                           const Gradients& gradients) {
  torch::autograd::variable_list result(num_arguments);
  if (needs[0]) result[kHidden] = std::get<0>(gradients);
  if (needs[1]) result[kWeight] = std::get<1>(gradients);
  if (needs[2]) result[kBias] = std::get<2>(gradients);
  return result;
}

/// Returns which gradients the forward pass of a loss forms: those that the caller requests and
/// those that its backward pass may need.
inline Needs NeedsInForward(Needs requested, const at::Tensor& hidden, const at::Tensor& weight,
                            const MaybeTensor& bias) {
  return {requested[0] || NeedsGradient(hidden), requested[1] || NeedsGradient(weight),
          bias.has_value() && (requested[2] || NeedsGradient(bias))};
}

/// Saves the gradients that the forward pass of a loss has formed, for BackwardOfLoss.
inline void SaveGradients(torch::autograd::variable_list gradients, bool has_bias,
                          torch::autograd::AutogradContext& context) {
  context.save_for_backward(std::move(gradients));
  context.saved_data["has_bias"] = has_bias;
}

/// The backward pass of a loss: multiplies the saved gradients in place by `upstream` [], and so
/// can run only once. `loss` is the name of the operator; a second run throws `has_run_error`.
inline torch::autograd::variable_list BackwardOfLoss(torch::autograd::AutogradContext& context,
                                                     const at::Tensor& upstream,
                                                     size_t num_arguments, const char* loss,
                                                     const char* has_run_error) {
  constexpr const char* kHasRun = "has_run";
  TORCH_CHECK(!at::GradMode::is_enabled(), loss,
              " has no second derivative: its gradients are constants");
  TORCH_CHECK(context.saved_data.count(kHasRun) == 0, has_run_error);
  torch::autograd::variable_list gradients(num_arguments);
  if (!upstream.defined()) return gradients;
  context.saved_data[kHasRun] = true;
  const torch::autograd::variable_list saved = context.get_saved_variables();
  const Needs needs = NeedsOf(context, context.saved_data["has_bias"].toBool());
  for (const size_t input : {kHidden, kWeight, kBias}) {
    if (!needs[input]) continue;
    at::Tensor gradient = saved[input];
    ScaleGradientOperator::Call(kScaleGradient, gradient, upstream);
    gradients[input] = gradient;
  }
  return gradients;
}

}  // namespace logprobd::torch_ops
