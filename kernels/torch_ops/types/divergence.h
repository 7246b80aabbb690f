#pragma once

// The divergence between a student's and a teacher's distributions, for distillation: arguments,
// their checks, and results.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

#include "kernels/divergence/divergence_math.h"
#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

using kernels::DivergenceKind;

/// Form in which a forward pass caches the gradient of each row's divergence with respect to the
/// dot products, so that the backward pass only multiplies.
enum class GradientCacheKind : int64_t {
  kNone = 0,         ///< Nothing: the backward pass recomputes the logits of both models.
  kWide = 1,         ///< In the wide dtype.
  kSixteenBits = 2,  ///< In the dtype of student_weight, if the products are computed in it.
};

/// Tensor arguments of linear_divergence. All are on one device and may have any strides. Only the
/// student's tensors have gradients.
struct DivergenceInputs {
  at::Tensor student_hidden;    ///< [..., H_s]: fp32, bf16, fp16 or fp64.
  at::Tensor student_weight;    ///< [V, H_s]: one of these dtypes, which may differ.
  MaybeTensor student_bias;     ///< [V]
  at::Tensor teacher_hidden;    ///< [..., H_t], with as many rows as student_hidden.
  at::Tensor teacher_weight;    ///< [V, H_t]
  MaybeTensor teacher_bias;     ///< [V]
  MaybeTensor mask;             ///< [...]: rows with 0 are not computed; absent: no such rows.
  MaybeTensor row_temperature;  ///< [...], > 0; absent: options.temperature.

  static constexpr auto Fields() {
    using In = DivergenceInputs;
    return std::tuple{Field{"student_hidden", &In::student_hidden},
                      Field{"student_weight", &In::student_weight},
                      Field{"student_bias", &In::student_bias},
                      Field{"teacher_hidden", &In::teacher_hidden},
                      Field{"teacher_weight", &In::teacher_weight},
                      Field{"teacher_bias", &In::teacher_bias},
                      Field{"mask", &In::mask},
                      Field{"row_temperature", &In::row_temperature}};
  }
};

/// Options of linear_divergence. The logits of each model are z = cap(scale * (hidden . weight) +
/// bias), with cap(x) = softcap * tanh(x / softcap); the distributions are the softmax of
/// z / temperature over the first `vocab_valid` columns.
struct DivergenceOptions {
  DivergenceKind kind = DivergenceKind::kForwardKl;
  double beta = 0.5;       ///< In (0, 1). Used only by kJsd.
  double temperature = 1;  ///< > 0
  double student_scale = 1;
  double student_softcap = 0;  ///< 0: no cap.
  double teacher_scale = 1;
  double teacher_softcap = 0;  ///< 0: no cap.
  int64_t vocab_valid = -1;    ///< -1: all columns, whose number is then equal for both models.
  GradientCacheKind keep_gradient = GradientCacheKind::kNone;
  /// Bytes for the logits of a block of rows and their gradients, without the cache. A block has at
  /// least one row.
  int64_t block_bytes = 0;

  static constexpr auto Fields() {
    using Opt = DivergenceOptions;
    return std::tuple{Field{"kind", &Opt::kind},
                      Field{"beta", &Opt::beta},
                      Field{"temperature", &Opt::temperature},
                      Field{"student_scale", &Opt::student_scale},
                      Field{"student_softcap", &Opt::student_softcap},
                      Field{"teacher_scale", &Opt::teacher_scale},
                      Field{"teacher_softcap", &Opt::teacher_softcap},
                      Field{"vocab_valid", &Opt::vocab_valid},
                      Field{"keep_gradient", &Opt::keep_gradient},
                      Field{"block_bytes", &Opt::block_bytes}};
  }
};

/// Results of a forward pass. Rows that are masked have zeros. The wide dtype is fp64 if any of the
/// hidden states and weights is fp64, otherwise fp32.
struct DivergenceOutputs {
  at::Tensor divergence;  ///< [...] in the wide dtype, nats, >= 0.
  at::Tensor entropy;     ///< [...] in the wide dtype: the student's entropy, nats, in [0, ln V].
  at::Tensor statistics;  ///< fp64 [rows, 5] for the backward pass (row_divergence.h).
  /// [rows, GradientPitch]: the cached gradients of the rows that are not masked, one after
  /// another. No elements if nothing is cached.
  at::Tensor cache;

  static constexpr auto Fields() {
    using Out = DivergenceOutputs;
    return std::tuple{Field{"divergence", &Out::divergence}, Field{"entropy", &Out::entropy},
                      Field{"statistics", &Out::statistics}, Field{"cache", &Out::cache}};
  }
};

/// Gradients of a loss with respect to the results, and what the forward pass has saved.
struct DivergenceUpstream {
  MaybeTensor divergence;  ///< [...]; absent: zero.
  MaybeTensor entropy;     ///< [...]; absent: zero.
  at::Tensor statistics;
  MaybeTensor cache;  ///< Not used if the entropy has a gradient; the logits are then recomputed.

  static constexpr auto Fields() {
    using Up = DivergenceUpstream;
    return std::tuple{Field{"d_divergence", &Up::divergence}, Field{"d_entropy", &Up::entropy},
                      Field{"statistics", &Up::statistics}, Field{"cache", &Up::cache}};
  }
};

/// A loss: the sum over rows of the divergence times the row's weight, and its gradients with
/// respect to student_hidden, student_weight and student_bias.
struct DivergenceLoss {
  at::Tensor loss;  ///< [], in the wide dtype.
  at::Tensor divergence;
  at::Tensor entropy;
  InputGradients gradients;

  static constexpr auto Fields() {
    using Loss = DivergenceLoss;
    return std::tuple_cat(
        std::tuple{Field{"loss", &Loss::loss}, Field{"divergence", &Loss::divergence},
                   Field{"entropy", &Loss::entropy}},
        FieldsOf(&Loss::gradients));
  }
};

/// Returns the dtype of sums: fp64 if any of the hidden states and weights is fp64, else fp32.
at::ScalarType WideDtype(const DivergenceInputs& inputs);

/// Returns the number of elements from one row to the next of logits and of their gradients. Rows
/// are aligned for vector loads of any dtype.
template <typename Size>
Size GradientPitch(const Size& columns) {
  constexpr int64_t kAlignment = 64;
  return (columns + (kAlignment - 1)) / kAlignment * kAlignment;
}

/// Bytes that a pass takes per row.
struct DivergenceRowBytes {
  int64_t logits;    ///< Of both models.
  int64_t gradient;  ///< Of a gradient in the form `cache_kind`, or in the form of a loss.
  /// The form in which a forward pass can cache gradients. kNone in fp16, whose range is too small
  /// for gradients that are not yet multiplied by the upstream gradient.
  GradientCacheKind cache_kind;
};
DivergenceRowBytes RowBytesOf(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                              at::ScalarType wide, int64_t columns);

/// Throws c10::ValueError unless all tensors are on the device of student_hidden.
void CheckDevices(const DivergenceInputs& inputs);

/// Throws a c10::ValueError that names the argument if one is invalid.
void CheckArguments(const DivergenceInputs& inputs, const DivergenceOptions& options);

/// Warns once per process and reason if a GPU does not multiply a model's hidden states and weight
/// in 16 bits.
void WarnOfSlowProducts(const DivergenceInputs& inputs);

/// Throws c10::ValueError unless `row_weights`, if given, has a floating-point number per row, on
/// the device of student_hidden.
void CheckRowWeights(const MaybeTensor& row_weights, const DivergenceInputs& inputs);

}  // namespace logprobd::torch_ops
