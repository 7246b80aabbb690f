// Autograd of torch.ops.logprobd.linear_logprob and linear_logprob_loss.

#include <ATen/ops/stack.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/torch_ops/api/autograd_context.h"
#include "kernels/torch_ops/api/linear_logprob.h"
#include "kernels/torch_ops/api/problem.h"
#include "kernels/torch_ops/api/signatures.h"
#include "kernels/torch_ops/loss/loss.h"
#include "kernels/torch_ops/ranks/rank_group.h"
#include "kernels/torch_ops/rows/device_ops.h"

namespace logprobd::torch_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Throws c10::ValueError if an input or coefficient needs a gradient that is not computed. The
/// other ranks of the group get the error in the first exchange of their call.
void CheckConstants(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                    const LossCoefficients& coefficients, const MaybeTensor& weight_grad) {
  const auto check = [&] {
    CheckNeedsNoGradient(inputs.row_temperature, "temperature");
    CheckNeedsNoGradient(inputs.mean_logit_weights, "mean_logit_weights");
    CheckNeedsNoGradient(weight_grad, "weight_grad");
    ForEachField<LossCoefficients>([&]<typename T>(const Field<LossCoefficients, T>& field) {
      if constexpr (std::is_same_v<T, MaybeTensor>) {
        CheckNeedsNoGradient(coefficients.*field.member, field.name);
      }
    });
  };
  DeferredError error;
  error.Run(check);
  if (!error.has_error()) return;
  // A traced call runs no collectives. Other modes, as that which counts operations, do not trace.
  using c10::impl::TorchDispatchModeKey;
  const auto has_mode = [](TorchDispatchModeKey mode) {
    return c10::impl::TorchDispatchModeTLS::get_mode(mode).has_value();
  };
  const bool is_traced = inputs.hidden.is_meta() || has_mode(TorchDispatchModeKey::FAKE) ||
                         has_mode(TorchDispatchModeKey::PROXY) ||
                         has_mode(TorchDispatchModeKey::FUNCTIONAL);
  if (!is_traced) Problem(inputs, options).group.RunOnAllRanks(inputs.hidden.device(), check);
  error.Rethrow(/*has_any_rank_failed=*/false);
}

/// Returns whether the backward pass that runs is the last one through its graph, so that it may
/// overwrite saved tensors. A traced pass must not, because it may run several times.
bool IsLastBackward() {
  return !torch::autograd::get_current_graph_task_keep_graph() &&
         !c10::impl::dispatch_mode_enabled();
}

/// Returns whether vmap runs the backward pass (is_grads_batched). It calls the operator once per
/// element of the batch, each time with the same saved tensors.
bool IsBatched(const variable_list& upstream) {
  const c10::DispatchKeySet batched(
      {c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched});
  return std::any_of(upstream.begin(), upstream.end(), [&](const Tensor& gradient) {
    return gradient.defined() && gradient.key_set().has_any(batched);
  });
}

/// Returns copies of lse and entropy for the backward pass, made by one kernel: the caller may
/// change the scores in place, which must not change the gradients. The entropy has no elements
/// unless it is needed.
std::pair<Tensor, Tensor> CopiesToSave(const Tensor& lse, const Tensor& entropy,
                                       const LinearLogprobOptions& options) {
  if (!options.need_entropy) return {lse.clone(), entropy.clone()};
  const Tensor copies = at::stack({lse, entropy});
  return {copies.select(0, 0), copies.select(0, 1)};
}

constexpr const char* kIsCacheOverwritten = "is_cache_overwritten";

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
    variable_list results = ListOf(ScoreOperator::Call(kScore, inputs, options, weight_grad));
    const auto [outputs] = FromList<LinearLogprobOutputs>(results);
    if (options.need_gradients) {
      const auto [lse, entropy] = CopiesToSave(outputs.lse, outputs.entropy, options);
      SavedOutputs saved = {lse, outputs.lse_rest, entropy};
      if (options.keep_logits != LogitCacheKind::kNone) saved.cache = outputs.cache;
      if (inputs.candidate_ids) saved.candidate_logprobs = outputs.candidate_logprobs.clone();
      if (options.top_k > 0) {
        saved.top_k_ids = outputs.top_k_ids.clone();
        saved.top_k_logprobs = outputs.top_k_logprobs.clone();
      }
      context->save_for_backward(ToList(inputs, saved));
    }
    context->saved_data["weight_grad"] = weight_grad;
    if (options.keep_logits != LogitCacheKind::kNone) {
      context->saved_data[kIsCaptured] = IsCapturing(inputs);
    }
    SaveOptions(options, *context);
    variable_list constants = {outputs.cache};
    if (!inputs.candidate_ids) constants.push_back(outputs.candidate_logprobs);
    for (const RowOutput& output : kRowOutputs) {
      if (output.is_differentiable && output.IsRequested(options)) continue;
      constants.push_back(outputs.*output.member);
    }
    context->mark_non_differentiable(constants);
    context->set_materialize_grads(false);  // Undefined gradients do not become zeros.
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const variable_list saved = context->get_saved_variables();
    auto [inputs, outputs] = FromList<LinearLogprobInputs, SavedOutputs>(saved);
    const auto [of_outputs] = FromList<LinearLogprobOutputs>(upstream);
    const UpstreamGradients gradients_of_scores = {IfDefined(of_outputs.logprob),
                                                   IfDefined(of_outputs.entropy),
                                                   IfDefined(of_outputs.lse),
                                                   IfDefined(of_outputs.mean_logit),
                                                   IfDefined(of_outputs.top_k_logprobs),
                                                   IfDefined(of_outputs.candidate_logprobs)};
    outputs.is_cache_overwritable = IsLastBackward() && !IsBatched(upstream);
    // Without a graph the cache has only the valid rows, which a captured pass does not know. A
    // backward pass that threw may be called again.
    if (outputs.cache.has_value() &&
        (context->saved_data[kIsCaptured].toBool() != IsCapturing(inputs) ||
         context->saved_data.count(kIsCacheOverwritten) > 0)) {
      outputs.cache.reset();
    }
    if (outputs.cache.has_value() && outputs.is_cache_overwritable) {
      context->saved_data[kIsCacheOverwritten] = true;
    }
    const auto weight_grad = context->saved_data["weight_grad"].toOptional<Tensor>();
    const Needs needs = NeedsOf(*context, inputs.bias.has_value());
    const auto options = SavedOptions<LinearLogprobOptions>(*context);
    Tensor d_hidden, d_weight, d_bias;
    if (needs[1] && weight_grad.has_value()) {
      Tensor buffer = *weight_grad;
      std::tie(d_hidden, d_bias) = BackwardIntoOperator::Call(
          kBackwardInto, gradients_of_scores, outputs, inputs, options, needs, buffer);
    } else {
      std::tie(d_hidden, d_weight, d_bias) =
          BackwardOperator::Call(kBackward, gradients_of_scores, outputs, inputs, options, needs);
    }
    return GradientsOfArguments(kNumArguments, needs, {d_hidden, d_weight, d_bias});
  }
};

Outputs ScoreWithGradient(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                          const MaybeTensor& weight_grad) {
  CheckConstants(inputs, options, /*coefficients=*/{}, weight_grad);
  LinearLogprobOptions with_needs = options;
  with_needs.need_gradients = options.need_gradients || NeedsGradient(inputs.hidden) ||
                              NeedsGradient(inputs.weight) || NeedsGradient(inputs.bias);
  return ToTuple<Outputs>(LinearLogprobFunction::apply(inputs.hidden, inputs.weight, inputs.bias,
                                                       inputs, with_needs, weight_grad));
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
    variable_list results =
        ListOf(LossOperator::Call(kLoss, inputs, options, coefficients, needs, cache_bytes));
    constexpr size_t kNumGradients = std::tuple_size_v<Gradients>;
    SaveGradients({results.end() - kNumGradients, results.end()}, bias.has_value(), *context);
    context->mark_non_differentiable({results.begin() + 1, results.end()});
    context->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    return BackwardOfLoss(
        *context, upstream[0], kNumArguments, "linear_logprob_loss",
        "a previous backward has used the gradients, which linear_logprob_loss formed in the "
        "forward. Call it again for each backward, or use linear_logprob, which supports "
        "retain_graph. linear_cross_entropy does so with gradients_in_forward=False");
  }
};

LossOutputs LossWithGradient(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                             const LossCoefficients& coefficients, Needs needs,
                             int64_t cache_bytes) {
  CheckConstants(inputs, options, coefficients, /*weight_grad=*/std::nullopt);
  needs = NeedsInForward(needs, inputs.hidden, inputs.weight, inputs.bias);
  return ToTuple<LossOutputs>(LossFunction::apply(inputs.hidden, inputs.weight, inputs.bias, inputs,
                                                  options, coefficients, needs, cache_bytes));
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
