// torch.ops.logprobd.*: schemas, what runs on CPU and CUDA, and shapes for tracing.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <string>

#include "kernels/torch_ops/device_memory.h"
#include "kernels/torch_ops/fused_forward.h"
#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/logit_cache.h"
#include "kernels/torch_ops/loss_gradients.h"
#include "kernels/torch_ops/op_signatures.h"
#include "kernels/torch_ops/rows.h"

namespace logprobd::torch_ops {
namespace {

GradientNeeds NeedsOf(Needs needs, const LinearLogprobInputs& inputs) {
  return {needs[0], needs[1], needs[2] && inputs.bias.has_value()};
}

// What runs.

Outputs Score(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
              const MaybeTensor& /*weight_grad*/) {
  LinearLogprobOutputs scores = Forward(inputs, options);
  return {scores.logprob,    scores.entropy,  scores.lse,  scores.argmax,
          scores.mean_logit, scores.lse_rest, scores.cache};
}

Gradients Differentiate(const BackwardInputs& back, const LinearLogprobInputs& inputs,
                        const LinearLogprobOptions& options, Needs needs) {
  InputGradients gradients =
      Backward(back.upstream, inputs, back.saved, options, NeedsOf(needs, inputs), std::nullopt);
  return {gradients.hidden, gradients.weight, gradients.bias};
}

GradientsBeside DifferentiateInto(const BackwardInputs& back, const LinearLogprobInputs& inputs,
                                  const LinearLogprobOptions& options, Needs needs,
                                  Tensor& weight_grad) {
  InputGradients gradients =
      Backward(back.upstream, inputs, back.saved, options, NeedsOf(needs, inputs), weight_grad);
  return {gradients.hidden, gradients.bias};
}

LossOutputs Lose(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                 const LossWeights& weights, Needs needs, int64_t cache_bytes) {
  const auto [loss, scores, gradients] =
      ForwardWithGradients(weights, inputs, options, NeedsOf(needs, inputs), cache_bytes);
  return {loss,          scores.logprob,    scores.entropy,   scores.lse,
          scores.argmax, scores.mean_logit, gradients.hidden, gradients.weight,
          gradients.bias};
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
          like_target(true, scores),
          RoomForLogits(inputs, options)};
}

Gradients DifferentiateShapes(const BackwardInputs& /*back*/, const LinearLogprobInputs& inputs,
                              const LinearLogprobOptions& /*options*/, Needs needs) {
  const auto shape = [](const Tensor& input, bool is_needed) {
    return is_needed ? at::empty_symint(input.sym_sizes(), input.options())
                     : at::empty({0}, input.options());
  };
  return {shape(inputs.hidden, needs[0]), shape(inputs.weight, needs[1]),
          shape(inputs.bias.value_or(inputs.weight), needs[2] && inputs.bias.has_value())};
}

GradientsBeside DifferentiateIntoShapes(const BackwardInputs& back,
                                        const LinearLogprobInputs& inputs,
                                        const LinearLogprobOptions& options, Needs needs,
                                        Tensor& /*weight_grad*/) {
  const auto [d_hidden, d_weight, d_bias] =
      DifferentiateShapes(back, inputs, options, {needs[0], false, needs[2]});
  return {d_hidden, d_bias};
}

LossOutputs LossShapes(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
                       const LossWeights& weights, Needs needs, int64_t /*cache_bytes*/) {
  CheckWeights(weights, inputs);
  LinearLogprobOptions scored = options;
  scored.keep_logits = KeptLogits::kNone;
  const auto [logprob, entropy, lse, argmax, mean_logit, lse_rest, cache] =
      ScoreShapes(inputs, scored, std::nullopt);
  const auto [d_hidden, d_weight, d_bias] = DifferentiateShapes({}, inputs, options, needs);
  const Tensor loss = at::empty({}, logprob.options());
  return {loss, logprob, entropy, lse, argmax, mean_logit, d_hidden, d_weight, d_bias};
}

void DefineOn(torch::Library& library) {
  library.impl("linear_logprob", &ScoreAs<&Score>);
  library.impl("linear_logprob_backward", &DifferentiateAs<&Differentiate>);
  library.impl("linear_logprob_backward_into", &DifferentiateIntoAs<&DifferentiateInto>);
  library.impl("linear_logprob_loss", &LoseAs<&Lose>);
  library.impl("scale_gradient_", &ScaleGradient);
}

TORCH_LIBRARY(logprobd, library) {
  library.def("has_fused_kernels() -> bool", &HasFusedKernels);
  library.def("free_bytes(int device, int enough) -> int", &FreeBytes);
  const std::string inputs =
      "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? row_temperature, "
      "Tensor? mean_logit_weights, float temperature, float scale, float softcap, int "
      "ignore_index, "
      "int vocab_start, int vocab_valid, str group, bool sequence_parallel, "
      "bool out_of_vocab_is_zero, bool need_entropy, bool need_argmax, bool need_mean_logit, "
      "int keep_logits, ";
  const std::string upstream =
      "Tensor? d_logprob, Tensor? d_entropy, Tensor? d_lse, Tensor? d_mean_logit, Tensor lse, "
      "Tensor lse_rest, Tensor entropy, Tensor? cache, ";
  library.def(("linear_logprob(" + inputs + "Tensor? weight_grad) -> (Tensor logprob, " +
               "Tensor entropy, Tensor lse, Tensor argmax, Tensor mean_logit, Tensor lse_rest, "
               "Tensor cache)")
                  .c_str());
  library.def(("linear_logprob_backward(" + upstream + inputs +
               "bool[3] needs) -> (Tensor d_hidden, Tensor d_weight, Tensor d_bias)")
                  .c_str());
  library.def(("linear_logprob_backward_into(" + upstream + inputs +
               "bool[3] needs, Tensor(a!) weight_grad) -> (Tensor d_hidden, Tensor d_bias)")
                  .c_str());
  library.def(("linear_logprob_loss(" + inputs +
               "Tensor? logprob_weights, Tensor? entropy_weights, Tensor? lse_weights, "
               "Tensor? mean_logit_weights, float[4] factors, bool is_mean, bool[3] needs, "
               "int cache_bytes) -> (Tensor loss, "
               "Tensor logprob, Tensor entropy, Tensor lse, Tensor argmax, Tensor mean_logit, "
               "Tensor d_hidden, Tensor d_weight, Tensor d_bias)")
                  .c_str());
  library.def("scale_gradient_(Tensor(a!) gradient, Tensor factor) -> ()");
}

TORCH_LIBRARY_IMPL(logprobd, CPU, library) { DefineOn(library); }
TORCH_LIBRARY_IMPL(logprobd, CUDA, library) { DefineOn(library); }

TORCH_LIBRARY_IMPL(logprobd, Meta, library) {
  library.impl("linear_logprob", &ScoreAs<&ScoreShapes>);
  library.impl("linear_logprob_backward", &DifferentiateAs<&DifferentiateShapes>);
  library.impl("linear_logprob_backward_into", &DifferentiateIntoAs<&DifferentiateIntoShapes>);
  library.impl("linear_logprob_loss", &LoseAs<&LossShapes>);
  library.impl("scale_gradient_", [](Tensor& /*gradient*/, const Tensor& /*factor*/) {});
}

}  // namespace
}  // namespace logprobd::torch_ops
