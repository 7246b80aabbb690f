#pragma once

// How the operators' flat arguments become the structs of linear_logprob.h and back.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/loss_gradients.h"

namespace logprobd::torch_ops {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline constexpr const char* kScore = "logprobd::linear_logprob";
inline constexpr const char* kDifferentiate = "logprobd::linear_logprob_backward";
inline constexpr const char* kDifferentiateInto = "logprobd::linear_logprob_backward_into";
inline constexpr const char* kLose = "logprobd::linear_logprob_loss";
inline constexpr const char* kScale = "logprobd::scale_gradient_";

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;
/// The loss, five scores, three gradients.
using LossOutputs =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
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
      const Tensor &entropy, const MaybeTensor &cache
#define LOGPROBD_INPUTS                                                                      \
  const Tensor &hidden, const Tensor &weight, const Tensor &target, const MaybeTensor &bias, \
      const MaybeTensor &row_temperature, const MaybeTensor &mean_logit_weights
#define LOGPROBD_OPTIONS                                                                       \
  double temperature, double scale, double softcap, int64_t ignore_index, int64_t vocab_start, \
      int64_t vocab_valid, std::string_view group, bool sequence_parallel,                     \
      bool out_of_vocab_is_zero, bool need_entropy, bool need_argmax, bool need_mean_logit,    \
      int64_t keep_logits

#define LOGPROBD_WEIGHTS                                                     \
  const MaybeTensor &logprob_weights, const MaybeTensor &entropy_weights,    \
      const MaybeTensor &lse_weights, const MaybeTensor &mean_logit_weights, \
      std::array<double, 4> factors, bool is_mean

#define LOGPROBD_UPSTREAM_STRUCT                                                   \
  BackwardInputs {                                                                 \
    {d_logprob, d_entropy, d_lse, d_mean_logit}, { lse, lse_rest, entropy, cache } \
  }
#define LOGPROBD_INPUTS_STRUCT \
  LinearLogprobInputs { hidden, weight, target, bias, row_temperature, mean_logit_weights }
#define LOGPROBD_OPTIONS_STRUCT                                                              \
  LinearLogprobOptions {                                                                     \
    temperature, scale, softcap, ignore_index, vocab_start, vocab_valid, std::string(group), \
        sequence_parallel, out_of_vocab_is_zero, need_entropy, need_argmax, need_mean_logit, \
        static_cast<KeptLogits>(keep_logits)                                                 \
  }

#define LOGPROBD_WEIGHTS_STRUCT                                                           \
  LossWeights {                                                                           \
    {logprob_weights, entropy_weights, lse_weights, mean_logit_weights}, factors, is_mean \
  }

using ScoreSignature = Outputs(LOGPROBD_INPUTS, LOGPROBD_OPTIONS, const MaybeTensor&);
using DifferentiateSignature = Gradients(LOGPROBD_UPSTREAM, LOGPROBD_INPUTS, LOGPROBD_OPTIONS,
                                         Needs);
using DifferentiateIntoSignature = GradientsBeside(LOGPROBD_UPSTREAM, LOGPROBD_INPUTS,
                                                   LOGPROBD_OPTIONS, Needs, Tensor&);

using LoseSignature = LossOutputs(LOGPROBD_INPUTS, LOGPROBD_OPTIONS, LOGPROBD_WEIGHTS, Needs,
                                  int64_t);
using ScaleSignature = void(Tensor&, const Tensor&);

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

template <auto kFunction>
LossOutputs LoseAs(LOGPROBD_INPUTS, LOGPROBD_OPTIONS, LOGPROBD_WEIGHTS, Needs needs,
                   int64_t cache_bytes) {
  return kFunction(LOGPROBD_INPUTS_STRUCT, LOGPROBD_OPTIONS_STRUCT, LOGPROBD_WEIGHTS_STRUCT, needs,
                   cache_bytes);
}

/// Calls the operator `name` with what follows it flattened again.
template <typename Signature, typename... More>
auto Call(const char* name, const LinearLogprobInputs& in, const LinearLogprobOptions& options,
          More&&... more) {
  const auto score = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
  return score.call(in.hidden, in.weight, in.target, in.bias, in.row_temperature,
                    in.mean_logit_weights, options.temperature, options.scale, options.softcap,
                    options.ignore_index, options.vocab_start, options.vocab_valid, options.group,
                    options.sequence_parallel, options.out_of_vocab_is_zero, options.need_entropy,
                    options.need_argmax, options.need_mean_logit,
                    static_cast<int64_t>(options.keep_logits), std::forward<More>(more)...);
}

template <typename Signature, typename... More>
auto Call(const char* name, const BackwardInputs& back, const LinearLogprobInputs& in,
          const LinearLogprobOptions& options, More&&... more) {
  const auto differentiate =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
  return differentiate.call(
      back.upstream.logprob, back.upstream.entropy, back.upstream.lse, back.upstream.mean_logit,
      back.saved.lse, back.saved.lse_rest, back.saved.entropy, back.saved.cache, in.hidden,
      in.weight, in.target, in.bias, in.row_temperature, in.mean_logit_weights, options.temperature,
      options.scale, options.softcap, options.ignore_index, options.vocab_start,
      options.vocab_valid, options.group, options.sequence_parallel, options.out_of_vocab_is_zero,
      options.need_entropy, options.need_argmax, options.need_mean_logit,
      static_cast<int64_t>(options.keep_logits), std::forward<More>(more)...);
}

}  // namespace logprobd::torch_ops
