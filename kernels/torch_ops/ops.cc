// torch.ops.logprobd.*: schemas, what runs on CPU and CUDA, shapes for tracing, and the gradient.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/rows.h"

namespace logprobd::torch_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;

constexpr const char* kScore = "logprobd::linear_logprob";
constexpr const char* kDifferentiate = "logprobd::linear_logprob_backward";
constexpr const char* kDifferentiateInto = "logprobd::linear_logprob_backward_into";

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;
using GradientsBeside = std::tuple<Tensor, Tensor>;  // all but the weight's
using Needs = std::array<bool, 3>;

/// What only the backward operators take.
struct BackwardInputs {
  UpstreamGradients upstream;
  SavedOutputs saved;
};

// An operator's arguments are flat; these name them once, for the adapters below.
#define LOGPROBD_UPSTREAM                                                               \
  const MaybeTensor &d_logprob, const MaybeTensor &d_entropy, const MaybeTensor &d_lse, \
      const MaybeTensor &d_mean_logit, const Tensor &lse, const Tensor &lse_rest,       \
      const Tensor &entropy
#define LOGPROBD_INPUTS                                                                      \
  const Tensor &hidden, const Tensor &weight, const Tensor &target, const MaybeTensor &bias, \
      const MaybeTensor &row_temperature, const MaybeTensor &column_weights
#define LOGPROBD_OPTIONS                                                                         \
  double temperature, double scale, double softcap, int64_t ignore_index, int64_t vocab_start,   \
      int64_t vocab_valid, std::string_view group, bool sequence_parallel, bool unowned_is_zero, \
      bool need_entropy, bool need_argmax, bool need_mean_logit

#define LOGPROBD_UPSTREAM_STRUCT                                            \
  BackwardInputs {                                                          \
    {d_logprob, d_entropy, d_lse, d_mean_logit}, { lse, lse_rest, entropy } \
  }
#define LOGPROBD_INPUTS_STRUCT \
  LinearLogprobInputs { hidden, weight, target, bias, row_temperature, column_weights }
#define LOGPROBD_OPTIONS_STRUCT                                                              \
  LinearLogprobOptions {                                                                     \
    temperature, scale, softcap, ignore_index, vocab_start, vocab_valid, std::string(group), \
        sequence_parallel, unowned_is_zero, need_entropy, need_argmax, need_mean_logit       \
  }

using ScoreSignature = Outputs(LOGPROBD_INPUTS, LOGPROBD_OPTIONS, const MaybeTensor&);
using DifferentiateSignature = Gradients(LOGPROBD_UPSTREAM, LOGPROBD_INPUTS, LOGPROBD_OPTIONS,
                                         Needs);
using DifferentiateIntoSignature = GradientsBeside(LOGPROBD_UPSTREAM, LOGPROBD_INPUTS,
                                                   LOGPROBD_OPTIONS, Needs, Tensor&);

template <auto kFunction>
Outputs ScoreAs(LOGPROBD_INPUTS, LOGPROBD_OPTIONS, const MaybeTensor& weight_grad) {
  return kFunction(LOGPROBD_INPUTS_STRUCT, LOGPROBD_OPTIONS_STRUCT, weight_grad);
}

template <auto kFunction>
Gradients DifferentiateAs(LOGPROBD_UPSTREAM, LOGPROBD_INPUTS, LOGPROBD_OPTIONS, Needs needs) {
  return kFunction(LOGPROBD_UPSTREAM_STRUCT, LOGPROBD_INPUTS_STRUCT, LOGPROBD_OPTIONS_STRUCT,
                   needs);
}

template <auto kFunction>
GradientsBeside DifferentiateIntoAs(LOGPROBD_UPSTREAM, LOGPROBD_INPUTS, LOGPROBD_OPTIONS,
                                    Needs needs, Tensor& weight_grad) {
  return kFunction(LOGPROBD_UPSTREAM_STRUCT, LOGPROBD_INPUTS_STRUCT, LOGPROBD_OPTIONS_STRUCT, needs,
                   weight_grad);
}

/// Calls the operator `name` with what follows it flattened again.
template <typename Signature, typename... More>
auto Call(const char* name, const LinearLogprobInputs& in, const LinearLogprobOptions& options,
          More&&... more) {
  const auto score = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
  return score.call(in.hidden, in.weight, in.target, in.bias, in.row_temperature, in.column_weights,
                    options.temperature, options.scale, options.softcap, options.ignore_index,
                    options.vocab_start, options.vocab_valid, options.group,
                    options.sequence_parallel, options.unowned_is_zero, options.need_entropy,
                    options.need_argmax, options.need_mean_logit, std::forward<More>(more)...);
}

template <typename Signature, typename... More>
auto Call(const char* name, const BackwardInputs& back, const LinearLogprobInputs& in,
          const LinearLogprobOptions& options, More&&... more) {
  const auto differentiate =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
  return differentiate.call(
      back.upstream.logprob, back.upstream.entropy, back.upstream.lse, back.upstream.mean_logit,
      back.saved.lse, back.saved.lse_rest, back.saved.entropy, in.hidden, in.weight, in.target,
      in.bias, in.row_temperature, in.column_weights, options.temperature, options.scale,
      options.softcap, options.ignore_index, options.vocab_start, options.vocab_valid,
      options.group, options.sequence_parallel, options.unowned_is_zero, options.need_entropy,
      options.need_argmax, options.need_mean_logit, std::forward<More>(more)...);
}

// What runs.

Outputs Score(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
              const MaybeTensor& /*weight_grad*/) {
  LinearLogprobOutputs scores = Forward(inputs, options);
  return {scores.logprob, scores.entropy,    scores.lse,
          scores.argmax,  scores.mean_logit, scores.lse_rest};
}

Gradients Differentiate(const BackwardInputs& back, const LinearLogprobInputs& inputs,
                        const LinearLogprobOptions& options, Needs needs) {
  InputGradients gradients = Backward(back.upstream, inputs, back.saved, options,
                                      {needs[0], needs[1], needs[2]}, std::nullopt);
  return {gradients.hidden, gradients.weight, gradients.bias};
}

GradientsBeside DifferentiateInto(const BackwardInputs& back, const LinearLogprobInputs& inputs,
                                  const LinearLogprobOptions& options, Needs needs,
                                  Tensor& weight_grad) {
  InputGradients gradients = Backward(back.upstream, inputs, back.saved, options,
                                      {needs[0], needs[1], needs[2]}, weight_grad);
  return {gradients.hidden, gradients.bias};
}

// Shapes for tracing.

Outputs ScoreShapes(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                    const MaybeTensor& weight_grad) {
  CheckDevices(inputs, weight_grad);  // one tensor on the meta device leads here
  const auto scores = inputs.target.options().dtype(WideType(inputs));
  const auto like_target = [&](bool is_needed, const at::TensorOptions& type) {
    return is_needed ? at::empty_symint(inputs.target.sym_sizes(), type) : at::empty({0}, type);
  };
  return {like_target(true, scores),
          like_target(options.need_entropy, scores),
          like_target(true, scores),
          like_target(options.need_argmax, scores.dtype(at::kLong)),
          like_target(options.need_mean_logit, scores),
          like_target(true, scores)};
}

Gradients DifferentiateShapes(const BackwardInputs& /*back*/, const LinearLogprobInputs& inputs,
                              const LinearLogprobOptions& /*options*/, Needs needs) {
  const auto shape = [](const Tensor& input, bool is_needed) {
    return is_needed ? at::empty_symint(input.sym_sizes(), input.options())
                     : at::empty({0}, input.options());
  };
  return {shape(inputs.hidden, needs[0]), shape(inputs.weight, needs[1]),
          shape(inputs.bias.value_or(inputs.weight), needs[2])};
}

GradientsBeside DifferentiateIntoShapes(const BackwardInputs& back,
                                        const LinearLogprobInputs& inputs,
                                        const LinearLogprobOptions& options, Needs needs,
                                        Tensor& /*weight_grad*/) {
  const auto [d_hidden, d_weight, d_bias] =
      DifferentiateShapes(back, inputs, options, {needs[0], false, needs[2]});
  return {d_hidden, d_bias};
}

// The gradient.

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
  kept["unowned_is_zero"] = options.unowned_is_zero;
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
          .unowned_is_zero = kept["unowned_is_zero"].toBool()};
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
    CheckNeedsNoGradient(column_weights, "column_weights");
    const auto [logprob, entropy, lse, argmax, mean_logit, lse_rest] =
        Call<ScoreSignature>(kScore, LOGPROBD_INPUTS_STRUCT, options, weight_grad);
    context->save_for_backward({hidden, weight, target, bias.value_or(Tensor()),
                                row_temperature.value_or(Tensor()),
                                column_weights.value_or(Tensor()), lse, lse_rest, entropy});
    context->saved_data["weight_grad"] = weight_grad;
    Keep(options, *context);
    variable_list constants = {argmax, lse_rest};
    if (!options.need_entropy) constants.push_back(entropy);
    if (!options.need_mean_logit) constants.push_back(mean_logit);
    context->mark_non_differentiable(constants);
    context->set_materialize_grads(false);  // absent gradients stay absent: they cost nothing
    return {logprob, entropy, lse, argmax, mean_logit, lse_rest};
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    const variable_list saved = context->get_saved_variables();
    const LinearLogprobInputs inputs = {
        saved[0],           saved[1], saved[2], IfDefined(saved[3]), IfDefined(saved[4]),
        IfDefined(saved[5])};
    const BackwardInputs back = {{IfDefined(upstream[0]), IfDefined(upstream[1]),
                                  IfDefined(upstream[2]), IfDefined(upstream[4])},
                                 {saved[6], saved[7], saved[8]}};
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
                                   in.column_weights, options, weight_grad);
  return {scores[0], scores[1], scores[2], scores[3], scores[4], scores[5]};
}

void DefineOn(torch::Library& library) {
  library.impl("linear_logprob", &ScoreAs<&Score>);
  library.impl("linear_logprob_backward", &DifferentiateAs<&Differentiate>);
  library.impl("linear_logprob_backward_into", &DifferentiateIntoAs<&DifferentiateInto>);
}

TORCH_LIBRARY(logprobd, library) {
  const std::string inputs =
      "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? row_temperature, "
      "Tensor? column_weights, float temperature, float scale, float softcap, int ignore_index, "
      "int vocab_start, int vocab_valid, str group, bool sequence_parallel, "
      "bool unowned_is_zero, bool need_entropy, bool need_argmax, bool need_mean_logit, ";
  const std::string upstream =
      "Tensor? d_logprob, Tensor? d_entropy, Tensor? d_lse, Tensor? d_mean_logit, Tensor lse, "
      "Tensor lse_rest, Tensor entropy, ";
  library.def(("linear_logprob(" + inputs + "Tensor? weight_grad) -> (Tensor logprob, " +
               "Tensor entropy, Tensor lse, Tensor argmax, Tensor mean_logit, Tensor lse_rest)")
                  .c_str());
  library.def(("linear_logprob_backward(" + upstream + inputs +
               "bool[3] needs) -> (Tensor d_hidden, Tensor d_weight, Tensor d_bias)")
                  .c_str());
  library.def(("linear_logprob_backward_into(" + upstream + inputs +
               "bool[3] needs, Tensor(a!) weight_grad) -> (Tensor d_hidden, Tensor d_bias)")
                  .c_str());
}

TORCH_LIBRARY_IMPL(logprobd, CPU, library) { DefineOn(library); }
TORCH_LIBRARY_IMPL(logprobd, CUDA, library) { DefineOn(library); }

TORCH_LIBRARY_IMPL(logprobd, Meta, library) {
  library.impl("linear_logprob", &ScoreAs<&ScoreShapes>);
  library.impl("linear_logprob_backward", &DifferentiateAs<&DifferentiateShapes>);
  library.impl("linear_logprob_backward_into", &DifferentiateIntoAs<&DifferentiateIntoShapes>);
}

TORCH_LIBRARY_IMPL(logprobd, Autograd, library) {
  library.impl("linear_logprob", &ScoreAs<&ScoreWithGradient>);
  // A second derivative is an error instead of a constant.
  library.impl("linear_logprob_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("linear_logprob_backward_into", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace logprobd::torch_ops
