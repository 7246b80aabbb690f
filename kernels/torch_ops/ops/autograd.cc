// Autograd of torch.ops.logprobd.linear_logprob, linear_divergence and their losses.

#include <ATen/ops/stack.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "kernels/torch_ops/ops/autograd_context.h"
#include "kernels/torch_ops/ops/signatures.h"
#include "kernels/torch_ops/paths/problem.h"
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
    for (const LossScore& score : kLossScores) {
      CheckNeedsNoGradient((coefficients.*score.coefficient).values, score.name);
    }
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

class LinearLogprobFunction : public torch::autograd::Function<LinearLogprobFunction> {
 public:
  static constexpr size_t kNumArguments = 6;

  static variable_list forward(AutogradContext* context, const Tensor& /*hidden*/,
                               const Tensor& /*weight*/, const MaybeTensor& /*bias*/,
                               const LinearLogprobInputs& inputs,
                               const LinearLogprobOptions& options,
                               const MaybeTensor& weight_grad) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const LinearLogprobOutputs outputs = ScoreOperator::Call(inputs, options, weight_grad);
    if (options.need_gradients) {
      const auto [lse, entropy] = CopiesToSave(outputs.lse, outputs.entropy, options);
      SavedOutputs saved = {lse, outputs.lse_rest, entropy};
      if (options.memory.keep_logits != LogitCacheKind::kNone) saved.cache = outputs.cache;
      if (inputs.candidate_ids) saved.candidate_logprobs = outputs.candidate_logprobs.clone();
      if (options.top_k > 0) {
        saved.top_k_ids = outputs.top_k_ids.clone();
        saved.top_k_logprobs = outputs.top_k_logprobs.clone();
      }
      context->save_for_backward(ToList(inputs, saved));
    }
    context->saved_data["weight_grad"] = weight_grad;
    if (options.memory.keep_logits != LogitCacheKind::kNone) {
      context->saved_data[kIsCaptured] = IsCapturing(inputs.hidden);
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
    return ToList(outputs);
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
        (context->saved_data[kIsCaptured].toBool() != IsCapturing(inputs.hidden) ||
         context->saved_data.count(kIsCacheOverwritten) > 0)) {
      outputs.cache.reset();
    }
    if (outputs.cache.has_value() && outputs.is_cache_overwritable) {
      context->saved_data[kIsCacheOverwritten] = true;
    }
    const auto weight_grad = context->saved_data["weight_grad"].toOptional<Tensor>();
    const GradientNeeds needs = NeedsOf(*context, inputs.bias.has_value());
    const auto options = SavedOptions<LinearLogprobOptions>(*context);
    if (!needs.weight || !weight_grad.has_value()) {
      return GradientsOfArguments(
          kNumArguments, needs,
          BackwardOperator::Call(gradients_of_scores, outputs, inputs, options, needs));
    }
    Tensor buffer = *weight_grad;
    InputGradients gradients =
        BackwardIntoOperator::Call(buffer, gradients_of_scores, outputs, inputs, options, needs);
    gradients.weight.reset();
    return GradientsOfArguments(kNumArguments, needs, gradients);
  }
};

LinearLogprobOutputs ScoreWithGradient(const LinearLogprobInputs& inputs,
                                       const LinearLogprobOptions& options,
                                       const MaybeTensor& weight_grad) {
  CheckConstants(inputs, options, /*coefficients=*/{}, weight_grad);
  LinearLogprobOptions with_needs = options;
  with_needs.need_gradients = options.need_gradients || NeedsGradient(inputs.hidden) ||
                              NeedsGradient(inputs.weight) || NeedsGradient(inputs.bias);
  const auto [outputs] = FromList<LinearLogprobOutputs>(LinearLogprobFunction::apply(
      inputs.hidden, inputs.weight, inputs.bias, inputs, with_needs, weight_grad));
  return outputs;
}

constexpr char kLossHasRun[] =
    "a previous backward has used the gradients, which linear_logprob_loss formed in the forward. "
    "Call it again for each backward, or use linear_logprob, which supports retain_graph. "
    "linear_cross_entropy does so with gradients_in_forward=False";

LinearLogprobLoss LossWithGradient(const LinearLogprobInputs& inputs,
                                   const LinearLogprobOptions& options,
                                   const LossCoefficients& coefficients, GradientNeeds needs,
                                   int64_t cache_bytes) {
  CheckConstants(inputs, options, coefficients, /*weight_grad=*/std::nullopt);
  const auto [loss] = FromList<LinearLogprobLoss>(LossFunction<LossOperator, kLossHasRun>::apply(
      inputs.hidden, inputs.weight, inputs.bias, inputs, options, coefficients,
      NeedsInForward(needs, inputs.hidden, inputs.weight, inputs.bias), cache_bytes));
  return loss;
}

class DivergenceFunction : public torch::autograd::Function<DivergenceFunction> {
 public:
  static constexpr size_t kNumArguments = 5;

  static variable_list forward(AutogradContext* context, const Tensor& /*hidden*/,
                               const Tensor& /*weight*/, const MaybeTensor& /*bias*/,
                               const DivergenceInputs& inputs, const DivergenceOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const DivergenceOutputs outputs = DivergenceOperator::Call(inputs, options);
    DivergenceUpstream saved;
    saved.statistics = outputs.statistics;
    if (options.keep_gradient != GradientCacheKind::kNone) saved.cache = outputs.cache;
    context->save_for_backward(ToList(inputs, saved));
    context->saved_data[kIsCaptured] = IsCapturing(inputs.student_hidden);
    SaveOptions(options, *context);
    context->mark_non_differentiable({outputs.statistics, outputs.cache});
    context->set_materialize_grads(false);
    return ToList(outputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    auto [inputs, of_results] =
        FromList<DivergenceInputs, DivergenceUpstream>(context->get_saved_variables());
    const auto [of_outputs] = FromList<DivergenceOutputs>(upstream);
    of_results.divergence = IfDefined(of_outputs.divergence);
    of_results.entropy = IfDefined(of_outputs.entropy);
    // Without a graph the cache has only the rows of the mask, which a captured pass does not know.
    if (context->saved_data[kIsCaptured].toBool() != IsCapturing(inputs.student_hidden)) {
      of_results.cache.reset();
    }
    const GradientNeeds needs = NeedsOf(*context, inputs.student_bias.has_value());
    return GradientsOfArguments(
        kNumArguments, needs,
        DivergenceBackwardOperator::Call(of_results, inputs,
                                         SavedOptions<DivergenceOptions>(*context), needs));
  }
};

DivergenceOutputs DivergenceWithGradient(const DivergenceInputs& inputs,
                                         const DivergenceOptions& options) {
  CheckNeedsNoGradient(inputs.row_temperature, "temperature");
  const auto [outputs] = FromList<DivergenceOutputs>(DivergenceFunction::apply(
      inputs.student_hidden, inputs.student_weight, inputs.student_bias, inputs, options));
  return outputs;
}

constexpr char kDivergenceLossHasRun[] =
    "linear_divergence_loss: a previous backward has used the gradients, which were formed in the "
    "forward. Call linear_divergence_loss again for each backward, or use linear_divergence, which "
    "supports retain_graph";

DivergenceLoss DivergenceLossWithGradient(const DivergenceInputs& inputs,
                                          const DivergenceOptions& options,
                                          const MaybeTensor& row_weights, bool is_mean,
                                          GradientNeeds needs) {
  CheckNeedsNoGradient(inputs.row_temperature, "temperature");
  CheckNeedsNoGradient(row_weights, "row_weights");
  const auto& [hidden, weight, bias] =
      std::tie(inputs.student_hidden, inputs.student_weight, inputs.student_bias);
  const auto [loss] =
      FromList<DivergenceLoss>(LossFunction<DivergenceLossOperator, kDivergenceLossHasRun>::apply(
          hidden, weight, bias, inputs, options, row_weights, is_mean,
          NeedsInForward(needs, hidden, weight, bias)));
  return loss;
}

TORCH_LIBRARY_IMPL(logprobd, Autograd, library) {
  ScoreOperator::Register<&ScoreWithGradient>(library);
  LossOperator::Register<&LossWithGradient>(library);
  DivergenceOperator::Register<&DivergenceWithGradient>(library);
  DivergenceLossOperator::Register<&DivergenceLossWithGradient>(library);
  // A second derivative is an error rather than a constant.
  for (const char* name : {kBackward, kBackwardInto, kScaleGradient, kDivergenceBackward}) {
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace
}  // namespace logprobd::torch_ops
