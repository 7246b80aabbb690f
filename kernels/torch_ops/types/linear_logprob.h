#pragma once

// Arguments and results of linear_logprob. To add an option: add a member and a line to
// LinearLogprobOptions, with kMustAgree if ranks must pass the same value, and read the member
// where it takes effect.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "kernels/torch_ops/types/fields.h"

namespace logprobd::torch_ops {

using MaybeTensor = std::optional<at::Tensor>;

/// Returns the dtype of sums and gradients: fp64 if hidden or weight are fp64, otherwise fp32.
inline at::ScalarType WideDtype(at::ScalarType hidden, at::ScalarType weight) {
  return hidden == at::kDouble || weight == at::kDouble ? at::kDouble : at::kFloat;
}

/// Returns whether two factors are multiplied in their own dtype, which is the case on a GPU if
/// both have the same 16-bit dtype. Other factors are converted to the wide dtype first.
inline bool IsMultipliedInSixteenBits(at::Device device, at::ScalarType a, at::ScalarType b) {
  return device.is_cuda() && (a == at::kBFloat16 || a == at::kHalf) && a == b;
}
inline bool IsMultipliedInSixteenBits(const at::Tensor& a, const at::Tensor& b) {
  return IsMultipliedInSixteenBits(a.device(), a.scalar_type(), b.scalar_type());
}

/// Tensor arguments of linear_logprob. All are on one device and may have any strides.
struct LinearLogprobInputs {
  at::Tensor hidden;  ///< [..., H]: fp32, bf16, fp16 or fp64.
  /// [V, H]: this rank's rows of the head. The dtype is one of those of hidden, and may differ.
  at::Tensor weight;
  at::Tensor target;            ///< [...], integers: ids in the whole vocabulary, or ignore_index.
  MaybeTensor bias;             ///< [V]
  MaybeTensor row_temperature;  ///< Shaped like target, > 0; absent: options.temperature.
  MaybeTensor mean_logit_weights;  ///< [V]; absent: 1 / size of the valid vocabulary.
  /// Integers: ids of the whole vocabulary whose logprobs are returned; the same on every rank.
  /// [..., K] with target's shape before K, or [N] with candidate_offsets. Absent: none.
  MaybeTensor candidate_ids;
  /// [rows + 1], integers: the candidates of row r are candidate_ids[offsets[r], offsets[r + 1]).
  MaybeTensor candidate_offsets;

  static constexpr auto Fields() {
    using In = LinearLogprobInputs;
    return std::tuple{Field{"hidden", &In::hidden},
                      Field{"weight", &In::weight},
                      Field{"target", &In::target},
                      Field{"bias", &In::bias},
                      Field{"row_temperature", &In::row_temperature},
                      Field{"mean_logit_weights", &In::mean_logit_weights},
                      Field{"candidate_ids", &In::candidate_ids},
                      Field{"candidate_offsets", &In::candidate_offsets}};
  }
};

/// Form in which a forward pass caches the logits for the backward pass. paths/logit_cache.h
/// describes the layouts.
enum class LogitCacheKind : int64_t {
  kNone = 0,  ///< Nothing: the backward pass recomputes the logits.
  kWide = 1,  ///< All logits, in the wide dtype.
  /// All logits as exponentials in 16 bits (kernels::CachedExponentials). Fused path only.
  kExponentials = 2,
  /// Like kExponentials, but relative to one reference exponent per row where possible. The
  /// operator chooses it when gradients are exponentials times a factor; callers cannot request it.
  kRebasedExponentials = 3,
};

/// Which part of the vocabulary a rank holds, and what the ranks of a group share.
struct VocabularyParallel {
  int64_t vocab_start = 0;   ///< Vocabulary id of the first row of the weight.
  int64_t vocab_valid = -1;  ///< Larger or equal ids are padding; -1: no rank has padding.
  /// Name of the process group that shares the head; empty: none. A group of one rank is like none.
  std::string group;
  bool sequence_parallel = false;  ///< hidden holds this rank's part of the rows of target.
  /// The gradient of hidden is that of this rank's shard alone: the caller sums it over the ranks.
  bool partial_hidden_gradient = false;

  static constexpr auto Fields() {
    using Part = VocabularyParallel;
    using enum AcrossRanks;
    return std::tuple{Field{"vocab_start", &Part::vocab_start, kMayDiffer},
                      Field{"vocab_valid", &Part::vocab_valid, kMustAgree},
                      Field{"group", &Part::group, kMayDiffer},
                      Field{"sequence_parallel", &Part::sequence_parallel, kMustAgree},
                      Field{"partial_hidden_gradient", &Part::partial_hidden_gradient, kMustAgree}};
  }
};

/// Which logits a forward pass keeps for the backward pass.
struct LogitMemory {
  LogitCacheKind keep_logits = LogitCacheKind::kNone;
  /// Largest number of rows that are cached: the first valid ones. If memory is short, no row is
  /// cached. -1: all rows; an out-of-memory error is then thrown.
  int64_t cached_rows = -1;

  static constexpr auto Fields() {
    using Memory = LogitMemory;
    return std::tuple{Field{"keep_logits", &Memory::keep_logits},
                      Field{"cached_rows", &Memory::cached_rows}};
  }
};

/// Options of linear_logprob. The logits are z = cap(scale * (hidden . weight) + bias), with
/// cap(x) = softcap * tanh(x / softcap); the scores are those of x = z / temperature.
struct LinearLogprobOptions {
  double temperature = 1;  ///< > 0
  double scale = 1;
  double softcap = 0;           ///< 0: no cap.
  int64_t ignore_index = -100;  ///< Rows with this target have zero scores and zero gradients.
  VocabularyParallel parallel;
  /// An out-of-vocabulary target has logprob 0 and the gradient of -lse, instead of an error.
  bool out_of_vocab_is_zero = false;
  bool need_entropy = true;
  bool need_argmax = false;
  bool need_mean_logit = false;
  bool need_max_logit = false;
  bool need_min_logit = false;
  /// Excludes caches of exponentials, with which the fused kernels do not compute it.
  bool need_sum_p_squared = false;
  /// Excludes caches of exponentials. On GPUs, a group of several ranks takes the tensor path for
  /// it.
  bool need_target_rank = false;
  int64_t top_k = 0;  ///< Length of top_k_ids and top_k_logprobs, 0 to kernels::kTopKMax.
  LogitMemory memory;
  /// False: autocast does not convert hidden, weight and bias.
  bool autocast = true;
  /// Number of bf16 values, 2 or 3, that represent an fp32 value of hidden in the fused kernels if
  /// the weight is bf16 (kernels/common/dtype.h). It has no effect on other dtypes or paths.
  int64_t hidden_splits = 2;
  /// A backward pass may follow, for which lse_rest is refined where gradients depend on it. Scores
  /// are the same without it. Autograd sets it; traced calls keep it because it is an argument.
  bool need_gradients = false;

  static constexpr auto Fields() {
    using Opt = LinearLogprobOptions;
    using enum AcrossRanks;
    return std::tuple_cat(
        std::tuple{
            Field{"temperature", &Opt::temperature, kMustAgree},
            Field{"scale", &Opt::scale, kMustAgree}, Field{"softcap", &Opt::softcap, kMustAgree},
            Field{"ignore_index", &Opt::ignore_index, kMustAgree},
            Field{"out_of_vocab_is_zero", &Opt::out_of_vocab_is_zero, kMustAgree},
            Field{"need_entropy", &Opt::need_entropy, kMustAgree},
            Field{"need_argmax", &Opt::need_argmax, kMustAgree},
            Field{"need_mean_logit", &Opt::need_mean_logit, kMustAgree},
            Field{"need_max_logit", &Opt::need_max_logit, kMustAgree},
            Field{"need_min_logit", &Opt::need_min_logit, kMustAgree},
            Field{"need_sum_p_squared", &Opt::need_sum_p_squared, kMustAgree},
            Field{"need_target_rank", &Opt::need_target_rank, kMustAgree},
            Field{"top_k", &Opt::top_k, kMustAgree}, Field{"autocast", &Opt::autocast, kMayDiffer},
            Field{"hidden_splits", &Opt::hidden_splits, kMustAgree},
            Field{"need_gradients", &Opt::need_gradients, kMustAgree}},
        FieldsOf(&Opt::parallel), FieldsOf(&Opt::memory));
  }
};

/// Results of a forward pass. Each score is shaped like target and in the wide dtype, which is fp64
/// if hidden or weight are fp64, otherwise fp32. A score that was not requested has no elements.
struct LinearLogprobOutputs {
  at::Tensor logprob;        ///< x[target] - lse, nats, <= 0.
  at::Tensor entropy;        ///< Entropy of softmax(x), nats, in [0, ln V].
  at::Tensor lse;            ///< Natural logarithm of the sum of exp(x).
  at::Tensor argmax;         ///< int64: the lowest id with the largest logit; -1 if not finite.
  at::Tensor mean_logit;     ///< Sum of mean_logit_weights * x.
  at::Tensor max_logit;      ///< Largest logit z, before temperature.
  at::Tensor min_logit;      ///< Smallest logit z, before temperature.
  at::Tensor sum_p_squared;  ///< Sum of the squared probabilities softmax(x), in (0, 1].
  /// int64: number of ids with a larger logit than the target's, or an equal one and a lower id; 0
  /// for the argmax. -1 if the row is not finite or its target is out-of-vocabulary.
  at::Tensor target_rank;
  /// [..., top_k], int64: ids of the largest logits, best first, the lowest id first among equals;
  /// -1 behind the last id of the vocabulary, and in rows that are not finite.
  at::Tensor top_k_ids;
  at::Tensor top_k_logprobs;  ///< [..., top_k]: x[id] - lse, nats, <= 0; NaN for id -1.
  /// Shaped like candidate_ids: x[id] - lse, nats, <= 0.
  at::Tensor candidate_logprobs;
  at::Tensor lse_rest;  ///< Rounding error of lse: exact lse minus lse.
  at::Tensor cache;     ///< Cache that options.memory requests (paths/logit_cache.h).

  /// Returns the fields that callers use; the others are read only by the backward pass.
  static constexpr auto Scores() {
    using Out = LinearLogprobOutputs;
    return std::tuple{Field{"logprob", &Out::logprob},
                      Field{"entropy", &Out::entropy},
                      Field{"lse", &Out::lse},
                      Field{"argmax", &Out::argmax},
                      Field{"mean_logit", &Out::mean_logit},
                      Field{"max_logit", &Out::max_logit},
                      Field{"min_logit", &Out::min_logit},
                      Field{"sum_p_squared", &Out::sum_p_squared},
                      Field{"target_rank", &Out::target_rank},
                      Field{"top_k_ids", &Out::top_k_ids},
                      Field{"top_k_logprobs", &Out::top_k_logprobs},
                      Field{"candidate_logprobs", &Out::candidate_logprobs}};
  }
  static constexpr auto Fields() {
    using Out = LinearLogprobOutputs;
    return std::tuple_cat(
        Scores(), std::tuple{Field{"lse_rest", &Out::lse_rest}, Field{"cache", &Out::cache}});
  }
};

/// A member of LinearLogprobOutputs that has the same number of values for every row.
struct RowOutput {
  at::Tensor LinearLogprobOutputs::*member;
  bool LinearLogprobOptions::*need = nullptr;  ///< The option that requests it; null: always set.
  bool is_id = false;                          ///< int64; otherwise it has the wide dtype.
  bool is_differentiable = false;
  /// The option that is the number of values per row, 0: not requested; null: one value.
  int64_t LinearLogprobOptions::*width = nullptr;

  bool IsRequested(const LinearLogprobOptions& options) const {
    return (need == nullptr || options.*need) && (width == nullptr || options.*width > 0);
  }
};

inline constexpr std::array kRowOutputs = {
    RowOutput{.member = &LinearLogprobOutputs::logprob, .is_differentiable = true},
    RowOutput{.member = &LinearLogprobOutputs::entropy,
              .need = &LinearLogprobOptions::need_entropy,
              .is_differentiable = true},
    RowOutput{.member = &LinearLogprobOutputs::lse, .is_differentiable = true},
    RowOutput{.member = &LinearLogprobOutputs::argmax,
              .need = &LinearLogprobOptions::need_argmax,
              .is_id = true},
    RowOutput{.member = &LinearLogprobOutputs::mean_logit,
              .need = &LinearLogprobOptions::need_mean_logit,
              .is_differentiable = true},
    RowOutput{.member = &LinearLogprobOutputs::max_logit,
              .need = &LinearLogprobOptions::need_max_logit},
    RowOutput{.member = &LinearLogprobOutputs::min_logit,
              .need = &LinearLogprobOptions::need_min_logit},
    RowOutput{.member = &LinearLogprobOutputs::sum_p_squared,
              .need = &LinearLogprobOptions::need_sum_p_squared},
    RowOutput{.member = &LinearLogprobOutputs::target_rank,
              .need = &LinearLogprobOptions::need_target_rank,
              .is_id = true},
    RowOutput{.member = &LinearLogprobOutputs::top_k_ids,
              .is_id = true,
              .width = &LinearLogprobOptions::top_k},
    RowOutput{.member = &LinearLogprobOutputs::top_k_logprobs,
              .is_differentiable = true,
              .width = &LinearLogprobOptions::top_k},
    RowOutput{.member = &LinearLogprobOutputs::lse_rest}};

/// Gradients of a loss with respect to the scores, each shaped like its score; absent: zero.
struct UpstreamGradients {
  MaybeTensor logprob;
  MaybeTensor entropy;
  MaybeTensor lse;
  MaybeTensor mean_logit;
  MaybeTensor top_k_logprobs = {};
  MaybeTensor candidate_logprobs = {};

  static constexpr auto Fields() {
    using Up = UpstreamGradients;
    return std::tuple{Field{"d_logprob", &Up::logprob},
                      Field{"d_entropy", &Up::entropy},
                      Field{"d_lse", &Up::lse},
                      Field{"d_mean_logit", &Up::mean_logit},
                      Field{"d_top_k_logprobs", &Up::top_k_logprobs},
                      Field{"d_candidate_logprobs", &Up::candidate_logprobs}};
  }
};

/// The members of UpstreamGradients with one value per row, to loop over.
inline constexpr std::array<MaybeTensor UpstreamGradients::*, 4> kUpstreamScores = {
    &UpstreamGradients::logprob, &UpstreamGradients::entropy, &UpstreamGradients::lse,
    &UpstreamGradients::mean_logit};

/// Results of a forward pass that its backward pass reads.
struct SavedOutputs {
  at::Tensor lse;
  at::Tensor lse_rest;
  at::Tensor entropy;
  MaybeTensor cache = {};               ///< Absent or without rows: all logits are recomputed.
  MaybeTensor top_k_ids = {};           ///< These are required with their upstream gradients.
  MaybeTensor top_k_logprobs = {};      ///< See top_k_ids.
  MaybeTensor candidate_logprobs = {};  ///< See top_k_ids.
  bool is_cache_overwritable = false;   ///< True if nothing reads the cache later.

  static constexpr auto Fields() {
    using Saved = SavedOutputs;
    return std::tuple{Field{"lse", &Saved::lse},
                      Field{"lse_rest", &Saved::lse_rest},
                      Field{"entropy", &Saved::entropy},
                      Field{"cache", &Saved::cache},
                      Field{"is_cache_overwritable", &Saved::is_cache_overwritable},
                      Field{"top_k_ids", &Saved::top_k_ids},
                      Field{"top_k_logprobs", &Saved::top_k_logprobs},
                      Field{"candidate_logprobs", &Saved::candidate_logprobs}};
  }
};

/// States which inputs need a gradient.
struct GradientNeeds {
  bool hidden = true;
  bool weight = true;
  bool bias = true;

  static constexpr GradientNeeds None() { return {false, false, false}; }
  bool any() const { return hidden || weight || bias; }

  static constexpr auto Fields() {
    using Needs = GradientNeeds;
    return std::tuple{Field{"needs_d_hidden", &Needs::hidden},
                      Field{"needs_d_weight", &Needs::weight}, Field{"needs_d_bias", &Needs::bias}};
  }
};

/// Gradients with respect to the inputs, in the dtypes of the inputs. A gradient that is not needed
/// has no elements.
struct InputGradients {
  at::Tensor hidden;
  at::Tensor weight;
  at::Tensor bias;

  static constexpr auto Fields() {
    using Grad = InputGradients;
    return std::tuple{Field{"d_hidden", &Grad::hidden}, Field{"d_weight", &Grad::weight},
                      Field{"d_bias", &Grad::bias}};
  }
};

/// Returns gradients in the shapes of the inputs, uninitialised; those that are not needed have no
/// elements. Sizes may be symbolic.
inline InputGradients EmptyGradients(const at::Tensor& hidden, const at::Tensor& weight,
                                     const MaybeTensor& bias, GradientNeeds needs) {
  const auto like = [](const at::Tensor& input, bool is_needed) {
    return is_needed ? at::empty_symint(input.sym_sizes(), input.options())
                     : at::empty({0}, input.options());
  };
  return {like(hidden, needs.hidden), like(weight, needs.weight),
          like(bias.value_or(weight), needs.bias && bias.has_value())};
}

}  // namespace logprobd::torch_ops
