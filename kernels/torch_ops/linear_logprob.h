#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace logprobd::torch_ops {

/// Tensors of linear_logprob, on one device. Strides are free.
struct LinearLogprobInputs {
  at::Tensor hidden;  ///< [..., H]: fp32, bf16, fp16 or fp64.
  at::Tensor
      weight;  ///< [V, H], this rank's rows of the head: the same dtypes, mixed as one likes.
  at::Tensor target;  ///< [...], ids in the whole vocabulary or ignore_index; any integer type.
  std::optional<at::Tensor> bias;             ///< [V]
  std::optional<at::Tensor> row_temperature;  ///< [...] like target, > 0; else options.temperature.
  /// [V]: what the mean logit weighs each column by; else 1 over the valid vocabulary.
  std::optional<at::Tensor> mean_logit_weights;
};

/// What Forward keeps of the logits for Backward; the formats are described in logit_cache.h.
enum class KeptLogits : int64_t {
  kNone = 0,  ///< They are computed again.
  kWide = 1,  ///< All of them, in the wide type.
  /// 2^(y - k) of all, in 16 bits (kernels/common/tile.h): by the fused kernels, for what they
  /// take.
  kExponentials = 2,
  /// Powers of a row relative to one exponent where they can be (kernels::CachedExponentials): by
  /// ForwardWithGradients for itself, where they are gradients but for a factor.
  kRebasedExponentials = 3,
};

/// What is computed of them. With z = cap(scale * (h . w) + bias), cap(x) = softcap * tanh(x /
/// softcap) where there is one, and x = z / temperature.
struct LinearLogprobOptions {
  double temperature = 1;  ///< > 0
  double scale = 1;
  double softcap = 0;           ///< 0: none
  int64_t ignore_index = -100;  ///< Rows with this target give and get zeros.
  int64_t vocab_start = 0;      ///< The whole vocabulary's id of weight's first row.
  int64_t vocab_valid =
      -1;             ///< Ids of the whole vocabulary that count; -1: all that the ranks have.
  std::string group;  ///< Name of the process group with the other shards; empty: none.
  /// Rows are split over the group: hidden holds this rank's part of target's rows.
  bool sequence_parallel = false;
  /// Targets outside the vocabulary: logprob 0 with the softmax's gradient instead of an error.
  bool out_of_vocab_is_zero = false;
  bool need_entropy = true;
  bool need_argmax = false;
  bool need_mean_logit = false;
  KeptLogits keep_logits = KeptLogits::kNone;  ///< Decided by each rank for itself.
};

/// Each like target, fp32 (fp64 where hidden or weight are); what is not needed has no elements.
struct LinearLogprobOutputs {
  at::Tensor logprob;     ///< x[target] - lse, nats, never above 0.
  at::Tensor entropy;     ///< Of softmax(x), nats, in [0, ln V].
  at::Tensor lse;         ///< ln of the sum of exp(x).
  at::Tensor argmax;      ///< int64, the lowest id among equals.
  at::Tensor mean_logit;  ///< Sum of mean_logit_weights * x.
  at::Tensor lse_rest;    ///< What rounding took from lse, for the gradient.
  at::Tensor cache;       ///< What options.keep_logits asks for; not like target.
};

/// What Backward needs of Forward's outputs.
struct SavedOutputs {
  at::Tensor lse;
  at::Tensor lse_rest;
  at::Tensor entropy;
  std::optional<at::Tensor> cache;  ///< Absent: logits are computed again.
  bool is_cache_spent = false;      ///< Nobody needs it afterwards: it may be overwritten.
};

/// Throws c10::ValueError where they are not on the device of hidden.
void CheckDevices(const LinearLogprobInputs& inputs, const std::optional<at::Tensor>& weight_grad);

/// Scores every row; logits exist for a block of rows and columns at a time, unless they are kept.
/// Ranks of a group call it together, with the same target; one that fails makes all raise.
///
/// Throws c10::ValueError for arguments that do not fit, and c10::IndexError for a target that no
/// rank has. Thread-safe.
LinearLogprobOutputs Forward(const LinearLogprobInputs& inputs,
                             const LinearLogprobOptions& options);

/// Gradients of a loss with respect to the outputs, each like target; absent: zero.
struct UpstreamGradients {
  std::optional<at::Tensor> logprob;
  std::optional<at::Tensor> entropy;
  std::optional<at::Tensor> lse;
  std::optional<at::Tensor> mean_logit;
};

/// All of them, for loops.
inline constexpr std::array<std::optional<at::Tensor> UpstreamGradients::*, 4> kScores = {
    &UpstreamGradients::logprob, &UpstreamGradients::entropy, &UpstreamGradients::lse,
    &UpstreamGradients::mean_logit};

struct GradientNeeds {
  bool hidden = true;
  bool weight = true;
  bool bias = true;
};

/// With respect to the inputs, in their dtypes; what is not needed has no elements.
struct InputGradients {
  at::Tensor hidden;
  at::Tensor weight;
  at::Tensor bias;
};

/// The gradients, block by block, with logits that were kept or are computed again: of logits kept
/// in the wide type the bits are those of computed ones. `weight_grad`, fp32 [V, H], gets the
/// weight's gradient added instead. Otherwise as Forward.
InputGradients Backward(const UpstreamGradients& upstream, const LinearLogprobInputs& inputs,
                        const SavedOutputs& saved, const LinearLogprobOptions& options,
                        GradientNeeds needs, const std::optional<at::Tensor>& weight_grad);

}  // namespace logprobd::torch_ops
