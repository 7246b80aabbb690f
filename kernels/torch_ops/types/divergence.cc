// Checks the arguments of linear_divergence, and chooses dtypes and sizes by them.

#include "kernels/torch_ops/types/divergence.h"

#include <ATen/TensorOperators.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>

#include "kernels/torch_ops/types/argument_checks.h"

namespace logprobd::torch_ops {
namespace {

void CheckModel(const std::string& prefix, const at::Tensor& hidden, const at::Tensor& weight,
                const MaybeTensor& bias, double scale, double softcap) {
  CheckHead(prefix, hidden, weight, /*rows_min=*/1);
  CheckPerColumn(prefix, "bias", bias, weight);
  TORCH_CHECK_VALUE(std::isfinite(scale) && scale != 0, prefix, "scale is ", scale,
                    ": it must be finite and not 0");
  CheckSoftcap(prefix, softcap);
}

void CheckPerRow(const MaybeTensor& values, const char* name, const at::Tensor& hidden) {
  const auto rows = hidden.sizes().slice(0, hidden.sizes().size() - 1);
  TORCH_CHECK_VALUE(!values.has_value() || values->sizes() == rows, name, " has the shape ",
                    values->sizes(), " but student_hidden has the shape ", hidden.sizes(), ": ",
                    name,
                    " must have the shape of student_hidden without its last "
                    "dimension");
}

void CheckVocabulary(const DivergenceInputs& inputs, const DivergenceOptions& options) {
  const int64_t student = inputs.student_weight.size(0);
  const int64_t teacher = inputs.teacher_weight.size(0);
  if (options.vocab_valid == -1) {
    TORCH_CHECK_VALUE(student == teacher, "student_weight has ", student,
                      " rows but teacher_weight has ", teacher,
                      ": set vocab_valid to the number of ids that the models have in common");
    return;
  }
  TORCH_CHECK_VALUE(options.vocab_valid > 0 && options.vocab_valid <= std::min(student, teacher),
                    "vocab_valid is ", options.vocab_valid, ": it must be from 1 to ",
                    std::min(student, teacher), ", the rows of the smaller weight");
}

void WarnOfSlowModel(const std::string& prefix, const at::Tensor& hidden,
                     const at::Tensor& weight) {
  if (!hidden.is_cuda() || IsMultipliedInSixteenBits(hidden, weight)) return;
  const at::ScalarType dtype = weight.scalar_type();
  const auto name_of = [](at::ScalarType each) { return c10::getDtypeNames(each).first; };
  std::ostringstream message;
  message << "linear_divergence does not multiply in 16 bits, which is many times faster, because "
          << prefix << "hidden is " << name_of(hidden.scalar_type()) << " and " << prefix
          << "weight is " << name_of(dtype) << ": ";
  if (WideDtype(hidden.scalar_type(), dtype) == at::kDouble) {
    message << "cast both to bfloat16 unless the results must be float64";
  } else if (dtype == at::kFloat) {
    message << "cast both to bfloat16 or run under torch.autocast";
  } else {
    message << "cast " << prefix << "hidden to " << name_of(dtype)
            << " or run under torch.autocast";
  }
  WarnOfSlowInputs(message.str());
}

}  // namespace

at::ScalarType WideDtype(const DivergenceInputs& inputs) {
  const auto of = [](const at::Tensor& hidden, const at::Tensor& weight) {
    return WideDtype(hidden.scalar_type(), weight.scalar_type());
  };
  return WideDtype(of(inputs.student_hidden, inputs.student_weight),
                   of(inputs.teacher_hidden, inputs.teacher_weight));
}

DivergenceRowBytes RowBytesOf(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                              at::ScalarType wide, int64_t columns) {
  const int64_t pitch = GradientPitch(columns);
  const auto wide_bytes = static_cast<int64_t>(c10::elementSize(wide)) * pitch;
  if (!IsMultipliedInSixteenBits(device, hidden, weight)) {
    return {2 * wide_bytes, wide_bytes, GradientCacheKind::kWide};
  }
  return {2 * wide_bytes, 2 * pitch,
          weight == at::kHalf ? GradientCacheKind::kNone : GradientCacheKind::kSixteenBits};
}

void CheckDevices(const DivergenceInputs& inputs) {
  ForEachField<DivergenceInputs>([&](const auto& field) {
    CheckOnDevice(inputs.*field.member, field.name, inputs.student_hidden, "student_hidden");
  });
}

void CheckArguments(const DivergenceInputs& inputs, const DivergenceOptions& options) {
  CheckDevices(inputs);
  CheckModel("student_", inputs.student_hidden, inputs.student_weight, inputs.student_bias,
             options.student_scale, options.student_softcap);
  CheckModel("teacher_", inputs.teacher_hidden, inputs.teacher_weight, inputs.teacher_bias,
             options.teacher_scale, options.teacher_softcap);
  CheckPerRow(inputs.teacher_hidden.select(-1, 0), "teacher_hidden without its last dimension",
              inputs.student_hidden);
  CheckPerRow(inputs.mask, "mask", inputs.student_hidden);
  CheckPerRow(inputs.row_temperature, "temperature", inputs.student_hidden);
  if (inputs.row_temperature.has_value()) {
    const at::Tensor& temperatures = *inputs.row_temperature;
    const bool has_mask = inputs.mask.has_value() && temperatures.is_cpu();
    CheckRowTemperatures(temperatures, has_mask ? *inputs.mask != 0 : at::Tensor());
  }
  CheckVocabulary(inputs, options);
  CheckTemperature(options.temperature);
  TORCH_CHECK_VALUE(
      options.kind >= DivergenceKind::kForwardKl && options.kind <= DivergenceKind::kJsd,
      "kind is ", static_cast<int64_t>(options.kind), ": it must be 0, 1 or 2");
  TORCH_CHECK_VALUE(options.kind != DivergenceKind::kJsd || (options.beta > 0 && options.beta < 1),
                    "beta is ", options.beta,
                    ": it must be above 0 and below 1; use a KL divergence for the limits");
  TORCH_CHECK_VALUE(options.block_bytes >= 0, "block_bytes is ", options.block_bytes,
                    ": it must not be negative");
}

void WarnOfSlowProducts(const DivergenceInputs& inputs) {
  WarnOfSlowModel("student_", inputs.student_hidden, inputs.student_weight);
  WarnOfSlowModel("teacher_", inputs.teacher_hidden, inputs.teacher_weight);
}

void CheckRowWeights(const MaybeTensor& row_weights, const DivergenceInputs& inputs) {
  CheckPerRow(row_weights, "row_weights", inputs.student_hidden);
  CheckFloatingPoint(row_weights, "row_weights");
  CheckOnDevice(row_weights, "row_weights", inputs.student_hidden, "student_hidden");
}

}  // namespace logprobd::torch_ops
