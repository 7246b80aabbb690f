// Autograd of torch.ops.logprobd.linear_logprob and linear_logprob_loss.

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>

#include "kernels/torch_ops/api/linear_logprob.h"
#include "kernels/torch_ops/api/signatures.h"
#include "kernels/torch_ops/loss/loss.h"
#include "kernels/torch_ops/rows/device_ops.h"

namespace logprobd::torch_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void SaveOptions(const LinearLogprobOptions& options, AutogradContext& context) {
  ForEachField<LinearLogprobOptions>([&](const auto& field) {
    const auto& value = options.*field.member;
    if constexpr (std::is_enum_v<std::remove_cvref_t<decltype(value)>>) {
      context.saved_data[field.name] = static_cast<int64_t>(value);
    } else {
      context.saved_data[field.name] = value;
    }
  });
}

LinearLogprobOptions SavedOptions(AutogradContext& context) {
  LinearLogprobOptions options;
  ForEachField<LinearLogprobOptions>([&](const auto& field) {
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

void CheckNeedsNoGradient(const MaybeTensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(!tensor.has_value() || !tensor->requires_grad(), name,
                    " requires a gradient, but none is computed for it: detach it");
}

void CheckConstantInputs(const LinearLogprobInputs& inputs) {
  CheckNeedsNoGradient(inputs.row_temperature, "temperature");
  CheckNeedsNoGradient(inputs.mean_logit_weights, "mean_logit_weights");
}

/// Returns whether the backward pass that runs is the last one through its graph, so that it may
/// overwrite saved tensors. A traced pass must not, because it may run several times.
bool IsLastBackward() {
  return !torch::autograd::get_current_graph_task_keep_graph() &&
         !c10::impl::dispatch_mode_enabled();
}

MaybeTensor IfDefined(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

// autograd::Function differentiates the tensors that `forward` takes directly: hidden, weight and
// bias. Tensors inside structs are constants to it. `backward` returns one gradient per argument
// of `forward`; a missing bias has no index in needs_input_grad.
constexpr size_t kHidden = 0, kWeight = 1, kBias = 2;

constexpr const char* kIsCaptured = "is_captured";

bool IsCapturing(const LinearLogprobInputs& inputs) {
  const at::Device device = inputs.hidden.device();
  return DeviceOps::For(device.type()).IsCapturing(device);
}

class LinearLogprobFunction : public torch::autograd::Function<LinearLogprobFunction> {
 public:
  static constexpr size_t kNumArguments = 6;

  static variable_list forward(AutogradContext* context, const Tensor& /*hidden*/,
                               const Tensor& /*weight*/, const MaybeTensor& /*bias*/,
                               const LinearLogprobInputs& inputs,
                               const LinearLogprobOptions& options,
                               const MaybeTensor& weight_grad) {
    const at::AutoDispatchBelowADInplaceOrView below;
    CheckConstantInputs(inputs);
    const auto [logprob, entropy, lse, argmax, mean_logit, lse_rest, cache] =
        ScoreOperator::Call(kScore, inputs, options, weight_grad);
    context->save_for_backward(
        {inputs.hidden, inputs.weight, inputs.target, inputs.bias.value_or(Tensor()),
         inputs.row_temperature.value_or(Tensor()), inputs.mean_logit_weights.value_or(Tensor()),
         lse, lse_rest, entropy, options.keep_logits == LogitCacheKind::kNone ? Tensor() : cache});
    context->saved_data["weight_grad"] = weight_grad;
    if (options.keep_logits != LogitCacheKind::kNone) {
      context->saved_data[kIsCaptured] = IsCapturing(inputs);
    }
    SaveOptions(options, *context);
    variable_list constants = {argmax, lse_rest, cache};
    if (!options.need_entropy) constants.push_back(entropy);
    if (!options.need_mean_logit) constants.push_back(mean_logit);
    context->mark_non_differentiable(constants);
    context->set_materialize_grads(false);  // Undefined gradients do not become zeros.
    return {logprob, entropy, lse, argmax, mean_logit, lse_rest, cache};
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const variable_list saved = context->get_saved_variables();
    const LinearLogprobInputs inputs = {
        saved[0],           saved[1], saved[2], IfDefined(saved[3]), IfDefined(saved[4]),
        IfDefined(saved[5])};
    const UpstreamGradients gradients_of_scores = {IfDefined(upstream[0]), IfDefined(upstream[1]),
                                                   IfDefined(upstream[2]), IfDefined(upstream[4])};
    SavedOutputs outputs = {saved[6], saved[7], saved[8], IfDefined(saved[9]), IsLastBackward()};
    // Without a graph the cache has only the valid rows, which a captured pass does not know.
    if (outputs.cache.has_value() &&
        context->saved_data[kIsCaptured].toBool() != IsCapturing(inputs)) {
      outputs.cache.reset();
    }
    const auto weight_grad = context->saved_data["weight_grad"].toOptional<Tensor>();
    const Needs needs = {context->needs_input_grad(kHidden), context->needs_input_grad(kWeight),
                         inputs.bias.has_value() && context->needs_input_grad(kBias)};
    const LinearLogprobOptions options = SavedOptions(*context);
    Tensor d_hidden, d_weight, d_bias;
    if (needs[1] && weight_grad.has_value()) {
      Tensor buffer = *weight_grad;
      std::tie(d_hidden, d_bias) = BackwardIntoOperator::Call(
          kBackwardInto, gradients_of_scores, outputs, inputs, options, needs, buffer);
    } else {
      std::tie(d_hidden, d_weight, d_bias) =
          BackwardOperator::Call(kBackward, gradients_of_scores, outputs, inputs, options, needs);
    }
    variable_list gradients(kNumArguments);
    if (needs[0]) gradients[kHidden] = d_hidden;
    if (needs[1]) gradients[kWeight] = d_weight;
    if (needs[2]) gradients[kBias] = d_bias;
    return gradients;
  }
};

Outputs ScoreWithGradient(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                          const MaybeTensor& weight_grad) {
  const variable_list scores = LinearLogprobFunction::apply(
      inputs.hidden, inputs.weight, inputs.bias, inputs, options, weight_grad);
  return {scores[0], scores[1], scores[2], scores[3], scores[4], scores[5], scores[6]};
}

/// A loss whose gradients are formed in the forward pass. Its backward pass scales them in place,
/// and so can run only once.
class LossFunction : public torch::autograd::Function<LossFunction> {
 public:
  static constexpr size_t kNumArguments = 8;

  static variable_list forward(AutogradContext* context, const Tensor& /*hidden*/,
                               const Tensor& /*weight*/, const MaybeTensor& bias,
                               const LinearLogprobInputs& inputs,
                               const LinearLogprobOptions& options,
                               const LossCoefficients& coefficients, Needs needs,
                               int64_t cache_bytes) {
    const at::AutoDispatchBelowADInplaceOrView below;
    CheckConstantInputs(inputs);
    ForEachField<LossCoefficients>([&](const auto& field) {
      const auto& value = coefficients.*field.member;
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, MaybeTensor>) {
        CheckNeedsNoGradient(value, field.name);
      }
    });
    const auto [loss, logprob, entropy, lse, argmax, mean_logit, d_hidden, d_weight, d_bias] =
        LossOperator::Call(kLoss, inputs, options, coefficients, needs, cache_bytes);
    context->save_for_backward({d_hidden, d_weight, d_bias});
    context->saved_data["has_bias"] = bias.has_value();
    context->mark_non_differentiable(
        {logprob, entropy, lse, argmax, mean_logit, d_hidden, d_weight, d_bias});
    context->set_materialize_grads(false);
    return {loss, logprob, entropy, lse, argmax, mean_logit, d_hidden, d_weight, d_bias};
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    constexpr const char* kHasRun = "has_run";
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "linear_logprob_loss has no second derivative: its gradients are constants");
    TORCH_CHECK(
        context->saved_data.count(kHasRun) == 0,
        "a previous backward has used the gradients, which linear_logprob_loss formed in the "
        "forward. Call it again for each backward, or use linear_logprob, which supports "
        "retain_graph. linear_cross_entropy does so with gradients_in_forward=False");
    variable_list gradients(kNumArguments);
    if (!upstream[0].defined()) return gradients;
    context->saved_data[kHasRun] = true;
    const variable_list saved = context->get_saved_variables();
    const size_t num_inputs = context->saved_data["has_bias"].toBool() ? 3 : 2;
    for (const size_t input : {kHidden, kWeight, kBias}) {
      if (input >= num_inputs || !context->needs_input_grad(input)) continue;
      Tensor gradient = saved[input];
      ScaleGradientOperator::Call(kScaleGradient, gradient, upstream[0]);
      gradients[input] = gradient;
    }
    return gradients;
  }
};

LossOutputs LossWithGradient(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                             const LossCoefficients& coefficients, Needs needs,
                             int64_t cache_bytes) {
  const auto is_needed = [](const Tensor& input) {
    return at::GradMode::is_enabled() && input.requires_grad();
  };
  needs[0] = needs[0] || is_needed(inputs.hidden);
  needs[1] = needs[1] || is_needed(inputs.weight);
  needs[2] = inputs.bias.has_value() && (needs[2] || is_needed(*inputs.bias));
  const variable_list out = LossFunction::apply(inputs.hidden, inputs.weight, inputs.bias, inputs,
                                                options, coefficients, needs, cache_bytes);
  return {out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7], out[8]};
}

TORCH_LIBRARY_IMPL(logprobd, Autograd, library) {
  library.impl("linear_logprob", ScoreOperator::Kernel<&ScoreWithGradient>());
  // A second derivative is an error rather than a constant.
  library.impl("linear_logprob_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("linear_logprob_backward_into", torch::autograd::autogradNotImplementedFallback());
  library.impl("linear_logprob_loss", LossOperator::Kernel<&LossWithGradient>());
  library.impl("scale_gradient_", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace logprobd::torch_ops
