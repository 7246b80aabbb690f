#pragma once

// Parts that the operators' autograd functions share: saved options and tensors, checks of
// constants, and the backward pass of a loss.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstddef>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/torch_ops/ops/signatures.h"
#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

template <HasFields Options>
void SaveOptions(const Options& options, torch::autograd::AutogradContext& context) {
  ForEachField<Options>([&](const auto& field) {
    using T = ValueOf<decltype(field)>;
    using Saved = std::conditional_t<std::is_enum_v<T>, int64_t, T>;
    context.saved_data[field.name] = static_cast<Saved>(field.In(options));
  });
}

template <HasFields Options>
Options SavedOptions(torch::autograd::AutogradContext& context) {
  Options options;
  ForEachField<Options>([&](const auto& field) {
    using T = ValueOf<decltype(field)>;
    using Saved = std::conditional_t<std::is_enum_v<T>, int64_t, T>;
    field.In(options) = static_cast<T>(context.saved_data[field.name].template to<Saved>());
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

/// Returns the tensors of structs one after another; absent tensors are undefined.
template <typename... Structs>
torch::autograd::variable_list ToList(const Structs&... structs) {
  torch::autograd::variable_list tensors;
  const auto append = [&]<typename Struct>(const Struct& from) {
    ForEachField<Struct>([&](const auto& field) {
      if constexpr (!std::is_same_v<ValueOf<decltype(field)>, bool>) {
        tensors.push_back(MaybeTensor(field.In(from)).value_or(at::Tensor()));
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
    ForEachField<Struct>([&](const auto& field) {
      using T = ValueOf<decltype(field)>;
      if constexpr (std::is_same_v<T, MaybeTensor>) {
        field.In(to) = IfDefined(tensors[i++]);
      } else if constexpr (!std::is_same_v<T, bool>) {
        field.In(to) = tensors[i++];
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
inline GradientNeeds NeedsOf(const torch::autograd::AutogradContext& context, bool has_bias) {
  return {context.needs_input_grad(kHidden), context.needs_input_grad(kWeight),
          has_bias && context.needs_input_grad(kBias)};
}

/// Returns the result of `backward`: one gradient per argument of `forward`, of which those that
/// are not needed are undefined.
inline torch::autograd::variable_list GradientsOfArguments(size_t num_arguments,
                                                           GradientNeeds needs,
                                                           const InputGradients& gradients) {
  torch::autograd::variable_list result(num_arguments);
  if (needs.hidden) result[kHidden] = gradients.hidden;
  if (needs.weight) result[kWeight] = gradients.weight;
  if (needs.bias) result[kBias] = gradients.bias;
  return result;
}

/// Returns which gradients the forward pass of a loss forms: those that the caller requests and
/// those that its backward pass may need.
inline GradientNeeds NeedsInForward(GradientNeeds requested, const at::Tensor& hidden,
                                    const at::Tensor& weight, const MaybeTensor& bias) {
  return {requested.hidden || NeedsGradient(hidden), requested.weight || NeedsGradient(weight),
          bias.has_value() && (requested.bias || NeedsGradient(bias))};
}

/// A loss whose gradients the operator forms in the forward pass. Its backward pass scales them in
/// place, and so can run only once: a second run throws kHasRunError.
template <typename LossOperator, const char* kHasRunError>
class LossFunction;
template <const char* kName, typename Loss, typename... Parameters, const char* kHasRunError>
class LossFunction<Operator<kName, Loss(Parameters...)>, kHasRunError>
    : public torch::autograd::Function<
          LossFunction<Operator<kName, Loss(Parameters...)>, kHasRunError>> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& /*hidden*/,
                                                const at::Tensor& /*weight*/,
                                                const MaybeTensor& bias, Parameters... parameters) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Loss loss = Operator<kName, Loss(Parameters...)>::Call(parameters...);
    context->save_for_backward(ToList(loss.gradients));
    context->saved_data["has_bias"] = bias.has_value();
    torch::autograd::variable_list results = ToList(loss);
    context->mark_non_differentiable({results.begin() + 1, results.end()});
    context->set_materialize_grads(false);  // Undefined gradients do not become zeros.
    return results;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& upstream) {
    constexpr const char* kHasRun = "has_run";
    TORCH_CHECK(!at::GradMode::is_enabled(), kName + std::string_view("logprobd::").size(),
                " has no second derivative: its gradients are constants");
    TORCH_CHECK(context->saved_data.count(kHasRun) == 0, kHasRunError);
    torch::autograd::variable_list gradients(3 + sizeof...(Parameters));
    if (!upstream[0].defined()) return gradients;
    context->saved_data[kHasRun] = true;
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const GradientNeeds needs = NeedsOf(*context, context->saved_data["has_bias"].toBool());
    gradients =
        GradientsOfArguments(gradients.size(), needs, std::get<0>(FromList<InputGradients>(saved)));
    for (at::Tensor& gradient : gradients) {
      if (gradient.defined()) ScaleGradientOperator::Call(gradient, upstream[0]);
    }
    return gradients;
  }
};

}  // namespace logprobd::torch_ops
