#include "kernels/torch_ops/paths/row_divergence.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/torch_ops/rows/shard.h"

namespace logprobd::torch_ops {
namespace {

/// One model's distributions of some rows, fp64 [n, columns].
struct Distributions {
  at::Tensor lse;       ///< [n, 1]
  at::Tensor logprobs;  ///< ln p
  at::Tensor p;
  at::Tensor slope;  ///< Derivative of the logits after the cap; undefined: 1.
};

Distributions DistributionsOf(const at::Tensor& dots, const DivergenceHead& head,
                              const at::Tensor& temperature, const at::Tensor& known_lse = {}) {
  at::Tensor z = dots.to(at::kDouble).mul(head.scale);
  if (head.bias.defined()) z.add_(head.bias);
  Distributions result;
  if (head.softcap > 0) {
    const at::Tensor tanh = z.div_(head.softcap).tanh_();
    result.slope = 1 - tanh * tanh;
    z = tanh * head.softcap;
  }
  z.div_(temperature);
  result.lse = known_lse.defined() ? known_lse : at::logsumexp(z, {1}, /*keepdim=*/true);
  result.logprobs = z.sub_(result.lse);
  result.p = result.logprobs.exp();
  return result;
}

/// Returns p * values, but 0 where p is 0, even if the value is infinite.
at::Tensor Weighted(const at::Tensor& p, const at::Tensor& values) {
  return at::where(p == 0, 0, p * values);
}

/// Returns coefficient * values, but 0 in rows whose coefficient is 0, even if values are NaN.
at::Tensor Scaled(const at::Tensor& coefficient, const at::Tensor& values) {
  return at::where(coefficient == 0, 0, coefficient * values);
}

at::Tensor LogMixture(const DivergenceBlock& block, const Distributions& student,
                      const Distributions& teacher) {
  return at::logaddexp(student.logprobs + std::log1p(-block.beta),
                       teacher.logprobs + std::log(block.beta));
}

/// Calls `visit` with slices of the block's rows of at most kBlockLogits logits, and their first
/// row.
void ForEachSlice(const DivergenceBlock& block,
                  const std::function<void(const DivergenceBlock&, int64_t)>& visit) {
  const int64_t num_rows = block.student_dots.size(0);
  const int64_t columns = std::max<int64_t>(block.student_dots.size(1), 1);
  const int64_t slice_rows = std::max<int64_t>(kBlockLogits / columns, 1);
  for (int64_t begin = 0; begin < num_rows; begin += slice_rows) {
    const int64_t size = std::min(slice_rows, num_rows - begin);
    DivergenceBlock slice = block;
    slice.student_dots = block.student_dots.narrow(0, begin, size);
    slice.teacher_dots = block.teacher_dots.narrow(0, begin, size);
    slice.temperature = block.temperature.narrow(0, begin, size);
    visit(slice, begin);
  }
}

}  // namespace

DivergenceCoefficients DivergenceCoefficients::Slice(int64_t begin, int64_t size) const {
  const auto slice = [&](const at::Tensor& values) {
    return values.defined() ? values.narrow(0, begin, size) : values;
  };
  return {slice(divergence), slice(entropy)};
}

const RowDivergence& RowDivergence::For(at::DeviceType device, at::ScalarType wide) {
  static const RowDivergence with_tensor_operations;
  if constexpr (LOGPROBD_TORCH_OPS_CUDA != 0) {
    if (device == at::kCUDA && wide == at::kFloat) return CudaRowDivergence();
  }
  return with_tensor_operations;
}

void RowDivergence::Sum(const DivergenceBlock& block, const at::Tensor& statistics) const {
  ForEachSlice(block, [&](const DivergenceBlock& slice, int64_t begin) {
    const Distributions student =
        DistributionsOf(slice.student_dots, slice.student, slice.temperature);
    const Distributions teacher =
        DistributionsOf(slice.teacher_dots, slice.teacher, slice.temperature);
    const auto relative_to = [](const Distributions& of, const at::Tensor& log_q) {
      return Weighted(of.p, of.logprobs - log_q).sum(1, /*keepdim=*/true);
    };
    at::Tensor divergence;
    at::Tensor share = at::zeros_like(student.lse);
    switch (slice.kind) {
      case DivergenceKind::kForwardKl:
        divergence = relative_to(teacher, student.logprobs);
        break;
      case DivergenceKind::kReverseKl:
        divergence = share = relative_to(student, teacher.logprobs);
        break;
      case DivergenceKind::kJsd: {
        const at::Tensor log_m = LogMixture(slice, student, teacher);
        share = relative_to(student, log_m);
        divergence = relative_to(teacher, log_m) * slice.beta + share * (1 - slice.beta);
        break;
      }
    }
    const at::Tensor entropy = Weighted(student.p, -student.logprobs).sum(1, /*keepdim=*/true);
    const auto columns = static_cast<double>(std::max<int64_t>(slice.student_dots.size(1), 1));
    const at::Tensor rows = statistics.narrow(0, begin, slice.student_dots.size(0));
    rows.narrow(1, kStudentLse, 1).copy_(student.lse);
    rows.narrow(1, kTeacherLse, 1).copy_(teacher.lse);
    rows.narrow(1, kDivergence, 1).copy_(divergence.clamp_min(0));
    rows.narrow(1, kStudentShare, 1).copy_(share);
    rows.narrow(1, kEntropy, 1).copy_(entropy.clamp(0, std::log(columns)));
  });
}

void RowDivergence::FormGradient(const DivergenceBlock& block, const at::Tensor& statistics,
                                 const DivergenceCoefficients& coefficients,
                                 const at::Tensor& gradient) const {
  ForEachSlice(block, [&](const DivergenceBlock& slice, int64_t begin) {
    const int64_t size = slice.student_dots.size(0);
    const auto statistic = [&](DivergenceStatistic column) {
      return statistics.narrow(0, begin, size).narrow(1, column, 1);
    };
    const Distributions student = DistributionsOf(slice.student_dots, slice.student,
                                                  slice.temperature, statistic(kStudentLse));
    const DivergenceCoefficients upstream = coefficients.Slice(begin, size);
    at::Tensor sum = at::zeros_like(student.p);
    if (upstream.divergence.defined()) {
      const Distributions teacher = DistributionsOf(slice.teacher_dots, slice.teacher,
                                                    slice.temperature, statistic(kTeacherLse));
      const auto student_part = [&](const at::Tensor& log_q) {
        return Weighted(student.p, student.logprobs - log_q - statistic(kStudentShare));
      };
      at::Tensor part;
      switch (slice.kind) {
        case DivergenceKind::kForwardKl:
          part = student.p - teacher.p;
          break;
        case DivergenceKind::kReverseKl:
          part = student_part(teacher.logprobs);
          break;
        case DivergenceKind::kJsd:
          part = student_part(LogMixture(slice, student, teacher)) * (1 - slice.beta);
          break;
      }
      sum += Scaled(upstream.divergence, part);
    }
    if (upstream.entropy.defined()) {
      sum -= Scaled(upstream.entropy, Weighted(student.p, student.logprobs + statistic(kEntropy)));
    }
    if (student.slope.defined()) sum *= student.slope;
    gradient.narrow(0, begin, size).copy_(sum * (slice.student.scale / slice.temperature));
  });
}

}  // namespace logprobd::torch_ops
