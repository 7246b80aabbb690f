// The gradients of torch.ops.logprobd.linear_logprob and linear_logprob_loss in autograd.

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/op_signatures.h"

namespace logprobd::torch_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What the gradient needs of the options.
void Keep(const LinearLogprobOptions& options, AutogradContext& context) {
  auto& kept = context.saved_data;
  kept["temperature"] = options.temperature;
  kept["scale"] = options.scale;
  kept["softcap"] = options.softcap;
  kept["ignore_index"] = options.ignore_index;
  kept["vocab_start"] = options.vocab_start;
  kept["vocab_valid"] = options.vocab_valid;
  kept["group"] = options.group;
  kept["sequence_parallel"] = options.sequence_parallel;
  kept["out_of_vocab_is_zero"] = options.out_of_vocab_is_zero;
  kept["keep_logits"] = static_cast<int64_t>(options.keep_logits);
}

LinearLogprobOptions Kept(AutogradContext& context) {
  auto& kept = context.saved_data;
  return {.temperature = kept["temperature"].toDouble(),
          .scale = kept["scale"].toDouble(),
          .softcap = kept["softcap"].toDouble(),
          .ignore_index = kept["ignore_index"].toInt(),
          .vocab_start = kept["vocab_start"].toInt(),
          .vocab_valid = kept["vocab_valid"].toInt(),
          .group = kept["group"].toStringRef(),
          .sequence_parallel = kept["sequence_parallel"].toBool(),
          .out_of_vocab_is_zero = kept["out_of_vocab_is_zero"].toBool(),
          .keep_logits = static_cast<KeptLogits>(kept["keep_logits"].toInt())};
}

void CheckNeedsNoGradient(const MaybeTensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(!tensor.has_value() || !tensor->requires_grad(), name,
                    " requires a gradient, and none is computed for it: detach it");
}

MaybeTensor IfDefined(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

class LinearLogprobFunction : public torch::autograd::Function<LinearLogprobFunction> {
 public:
  static variable_list forward(AutogradContext* context, LOGPROBD_INPUTS,
                               const LinearLogprobOptions& options,
                               const MaybeTensor& weight_grad) {
    const at::AutoDispatchBelowADInplaceOrView below;
    CheckNeedsNoGradient(row_temperature, "temperature");
    CheckNeedsNoGradient(mean_logit_weights, "mean_logit_weights");
    const auto [logprob, entropy, lse, argmax, mean_logit, lse_rest, cache] =
        Call<ScoreSignature>(kScore, LOGPROBD_INPUTS_STRUCT, options, weight_grad);
    context->save_for_backward({hidden, weight, target, bias.value_or(Tensor()),
                                row_temperature.value_or(Tensor()),
                                mean_logit_weights.value_or(Tensor()), lse, lse_rest, entropy,
                                options.keep_logits == KeptLogits::kNone ? Tensor() : cache});
    context->saved_data["weight_grad"] = weight_grad;
    Keep(options, *context);
    variable_list constants = {argmax, lse_rest, cache};
    if (!options.need_entropy) constants.push_back(entropy);
    if (!options.need_mean_logit) constants.push_back(mean_logit);
    context->mark_non_differentiable(constants);
    context->set_materialize_grads(false);  // absent gradients stay absent: they cost nothing
    return {logprob, entropy, lse, argmax, mean_logit, lse_rest, cache};
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const variable_list saved = context->get_saved_variables();
    const LinearLogprobInputs inputs = {
        saved[0],           saved[1], saved[2], IfDefined(saved[3]), IfDefined(saved[4]),
        IfDefined(saved[5])};
    const BackwardInputs back = {{IfDefined(upstream[0]), IfDefined(upstream[1]),
                                  IfDefined(upstream[2]), IfDefined(upstream[4])},
                                 {saved[6], saved[7], saved[8], IfDefined(saved[9])}};
    const auto weight_grad = context->saved_data["weight_grad"].toOptional<Tensor>();
    const Needs needs = {context->needs_input_grad(0), context->needs_input_grad(1),
                         inputs.bias.has_value() && context->needs_input_grad(3)};
    Tensor d_hidden, d_weight, d_bias;
    if (needs[1] && weight_grad.has_value()) {
      Tensor buffer = *weight_grad;
      std::tie(d_hidden, d_bias) = Call<DifferentiateIntoSignature>(
          kDifferentiateInto, back, inputs, Kept(*context), needs, buffer);
    } else {
      std::tie(d_hidden, d_weight, d_bias) =
          Call<DifferentiateSignature>(kDifferentiate, back, inputs, Kept(*context), needs);
    }
    // One for each argument of forward.
    variable_list gradients(8);
    if (needs[0]) gradients[0] = d_hidden;
    if (needs[1]) gradients[1] = d_weight;
    if (needs[2]) gradients[3] = d_bias;
    return gradients;
  }
};

Outputs ScoreWithGradient(const LinearLogprobInputs& in, const LinearLogprobOptions& options,
                          const MaybeTensor& weight_grad) {
  const variable_list scores =
      LinearLogprobFunction::apply(in.hidden, in.weight, in.target, in.bias, in.row_temperature,
                                   in.mean_logit_weights, options, weight_grad);
  return {scores[0], scores[1], scores[2], scores[3], scores[4], scores[5], scores[6]};
}

/// A loss whose gradients were formed with it: the backward scales them in place, once.
class LossFunction : public torch::autograd::Function<LossFunction> {
 public:
  static variable_list forward(AutogradContext* context, LOGPROBD_INPUTS,
                               const LinearLogprobOptions& options, const LossWeights& weights,
                               Needs needs, int64_t cache_bytes) {
    const at::AutoDispatchBelowADInplaceOrView below;
    CheckNeedsNoGradient(row_temperature, "temperature");
    CheckNeedsNoGradient(mean_logit_weights, "mean_logit_weights");
    CheckNeedsNoGradient(weights.rows.logprob, "logprob_weights");
    CheckNeedsNoGradient(weights.rows.entropy, "entropy_weights");
    CheckNeedsNoGradient(weights.rows.lse, "lse_weights");
    CheckNeedsNoGradient(weights.rows.mean_logit, "mean_logit_weights");
    const auto [loss, logprob, entropy, lse, argmax, mean_logit, d_hidden, d_weight, d_bias] =
        Call<LoseSignature>(kLose, LOGPROBD_INPUTS_STRUCT, options, weights.rows.logprob,
                            weights.rows.entropy, weights.rows.lse, weights.rows.mean_logit,
                            weights.factors, weights.is_mean, needs, cache_bytes);
    context->save_for_backward({d_hidden, d_weight, d_bias});
    context->saved_data["has_bias"] = bias.has_value();
    context->mark_non_differentiable(
        {logprob, entropy, lse, argmax, mean_logit, d_hidden, d_weight, d_bias});
    context->set_materialize_grads(false);
    return {loss, logprob, entropy, lse, argmax, mean_logit, d_hidden, d_weight, d_bias};
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    constexpr const char* kSpent = "is_spent";
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "linear_logprob_loss has no second derivative: its gradients are constants");
    TORCH_CHECK(
        context->saved_data.count(kSpent) == 0,
        "linear_logprob_loss: a backward before this one has taken its gradients, which were "
        "formed in the forward. Call linear_logprob_loss again for each backward, or use "
        "linear_logprob, which serves retain_graph");
    variable_list gradients(10);  // one for each argument of forward
    if (!upstream[0].defined()) return gradients;
    context->saved_data[kSpent] = true;
    const variable_list saved = context->get_saved_variables();
    const bool has_bias = context->saved_data["has_bias"].toBool();
    const auto scale =
        c10::Dispatcher::singleton().findSchemaOrThrow(kScale, "").typed<ScaleSignature>();
    // hidden, weight, bias; only arguments that are there have a number in needs_input_grad.
    constexpr std::array<size_t, 3> kPlaces = {0, 1, 3};
    for (size_t i = 0; i < (has_bias ? 3 : 2); ++i) {
      if (!context->needs_input_grad(kPlaces[i])) continue;
      Tensor gradient = saved[i];
      scale.call(gradient, upstream[0]);
      gradients[kPlaces[i]] = gradient;
    }
    return gradients;
  }
};

LossOutputs LoseWithGradient(const LinearLogprobInputs& in, const LinearLogprobOptions& options,
                             const LossWeights& weights, Needs needs, int64_t cache_bytes) {
  const auto is_needed = [](const Tensor& input) {
    return at::GradMode::is_enabled() && input.requires_grad();
  };
  needs[0] = needs[0] || is_needed(in.hidden);
  needs[1] = needs[1] || is_needed(in.weight);
  needs[2] = in.bias.has_value() && (needs[2] || is_needed(*in.bias));
  const variable_list out =
      LossFunction::apply(in.hidden, in.weight, in.target, in.bias, in.row_temperature,
                          in.mean_logit_weights, options, weights, needs, cache_bytes);
  return {out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7], out[8]};
}

TORCH_LIBRARY_IMPL(logprobd, Autograd, library) {
  library.impl("linear_logprob", &ScoreAs<&ScoreWithGradient>);
  // A second derivative is an error instead of a constant.
  library.impl("linear_logprob_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("linear_logprob_backward_into", torch::autograd::autogradNotImplementedFallback());
  library.impl("linear_logprob_loss", &LoseAs<&LoseWithGradient>);
  library.impl("scale_gradient_", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace logprobd::torch_ops
