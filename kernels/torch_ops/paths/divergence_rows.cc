#include "kernels/torch_ops/paths/divergence_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "kernels/torch_ops/paths/logits.h"
#include "kernels/torch_ops/rows/device_ops.h"

namespace logprobd::torch_ops {
namespace {

/// Blocks of fewer rows make the products slower, because each reads both weights.
constexpr int64_t kLogitRowsMin = 1'024;
/// Blocks of more rows do not make the products faster.
constexpr int64_t kLogitRowsMax = 4'096;

at::Tensor FlatRows(const at::Tensor& hidden) {
  return hidden.dim() == 2 ? hidden : hidden.reshape({-1, hidden.size(-1)});
}

/// Returns the rows of each of the fewest equal blocks of at most `rows_max` rows, of at least one.
int64_t EqualBlocks(int64_t num_rows, int64_t rows_max) {
  rows_max = std::clamp<int64_t>(rows_max, 1, std::max<int64_t>(num_rows, 1));
  const int64_t num_blocks = std::max<int64_t>((num_rows + rows_max - 1) / rows_max, 1);
  constexpr int64_t kAlignment = 128;  // rows of a tile of the products
  const int64_t rows = (num_rows + num_blocks - 1) / num_blocks;
  return std::min(rows_max, (rows + kAlignment - 1) / kAlignment * kAlignment);
}

void WriteDots(const at::Tensor& hidden, const DivergenceHead& head, at::ScalarType wide,
               const at::Tensor& dots) {
  ForEachColumns(IsMultipliedInSixteenBits(hidden, head.weight), hidden.size(0),
                 head.weight.size(0), [&](Columns columns) {
                   MultiplyInto(dots.narrow(1, columns.begin, columns.size()), Into::kReplace,
                                hidden, SliceRows(head.weight, columns.begin, columns.size()).t(),
                                wide);
                 });
}

/// Returns the temperatures of all rows, fp64 [num_all]. In a CUDA graph, which computes the masked
/// rows as well, theirs are 1, because they may be 0 or NaN.
at::Tensor RowTemperatures(const DivergenceInputs& inputs) {
  at::Tensor temperatures = Flat(*inputs.row_temperature).to(at::kDouble);
  if (!inputs.mask.has_value() || !IsCapturing(inputs.student_hidden)) return temperatures;
  return at::where(FlatMask(inputs), temperatures, 1);
}

}  // namespace

at::Tensor FlatMask(const DivergenceInputs& inputs) {
  return inputs.mask.has_value() ? Flat(*inputs.mask) != 0 : at::Tensor();
}

at::Tensor WithoutMasked(const at::Tensor& values, const at::Tensor& mask) {
  return mask.defined() ? at::where(mask, values, 0) : values;
}

bool DivergenceRows::are_gradients_in_sixteen_bits() const {
  return IsMultipliedInSixteenBits(student_hidden, student.weight);
}

DivergenceRowBytes DivergenceRows::row_bytes() const {
  return RowBytesOf(student_hidden.device(), student_hidden.scalar_type(),
                    student.weight.scalar_type(), wide, columns());
}

DivergenceRows DivergenceRows::Slice(int64_t begin, int64_t size) const {
  DivergenceRows slice = *this;
  slice.subset = {};
  slice.student_hidden = SliceRows(student_hidden, begin, size);
  slice.teacher_hidden = SliceRows(teacher_hidden, begin, size);
  slice.temperature = SliceRows(temperature, begin, size);
  return slice;
}

at::Tensor DivergenceRows::EmptyGradients(int64_t num_rows) const {
  const at::ScalarType dtype =
      are_gradients_in_sixteen_bits() ? student.weight.scalar_type() : wide;
  return at::empty({num_rows, GradientPitch(columns())}, student_hidden.options().dtype(dtype));
}

DivergenceRows SelectRows(const at::Tensor& is_selected, const DivergenceInputs& inputs,
                          const DivergenceOptions& options) {
  const at::Tensor all_student_hidden = FlatRows(inputs.student_hidden);
  DivergenceRows rows;
  Rows& subset = rows.subset;
  subset.num_all = all_student_hidden.size(0);
  if (is_selected.defined()) {
    const at::Tensor indices = at::nonzero(is_selected).squeeze(1);
    if (indices.size(0) < subset.num_all) subset.row_indices = indices;
  }
  const int64_t columns =
      options.vocab_valid > 0 ? options.vocab_valid : inputs.student_weight.size(0);
  const at::ScalarType wide = WideDtype(inputs);
  const auto head = [&](const at::Tensor& weight, const MaybeTensor& bias, double scale,
                        double softcap) {
    DivergenceHead result = {SliceRows(weight, 0, columns), {}, scale, softcap};
    if (bias.has_value()) result.bias = SliceRows(*bias, 0, columns).to(wide).contiguous();
    return result;
  };
  rows.student_hidden = subset.GatherFromAll(all_student_hidden);
  rows.teacher_hidden = subset.GatherFromAll(FlatRows(inputs.teacher_hidden));
  rows.temperature = inputs.row_temperature.has_value()
                         ? subset.GatherFromAll(RowTemperatures(inputs)).contiguous().unsqueeze(1)
                         : at::full({rows.size(), 1}, options.temperature,
                                    inputs.student_hidden.options().dtype(at::kDouble));
  rows.kind = options.kind;
  rows.beta = options.beta;
  rows.student = head(inputs.student_weight, inputs.student_bias, options.student_scale,
                      options.student_softcap);
  rows.teacher = head(inputs.teacher_weight, inputs.teacher_bias, options.teacher_scale,
                      options.teacher_softcap);
  rows.wide = wide;
  return rows;
}

BlockRows BlocksWithin(int64_t bytes, int64_t num_rows, const DivergenceRowBytes& row_bytes) {
  const int64_t logits_beside_all =
      std::min(kLogitRowsMax, (bytes - num_rows * row_bytes.gradient) / row_bytes.logits);
  const bool fits_all =
      num_rows <= kBlockRows && logits_beside_all >= std::min(num_rows, kLogitRowsMin);
  if (fits_all || row_bytes.gradient == 0) {
    return {EqualBlocks(num_rows, logits_beside_all), num_rows};
  }
  const int64_t rows_of_both = bytes / (row_bytes.logits + row_bytes.gradient);
  const int64_t logits = std::clamp<int64_t>(rows_of_both / 2, 1, kLogitRowsMin);
  const int64_t gradients =
      std::clamp<int64_t>((bytes - logits * row_bytes.logits) / row_bytes.gradient, logits,
                          std::min(kBlockRows, std::max<int64_t>(num_rows, 1)));
  return {logits, EqualBlocks(num_rows, gradients)};
}

void ForEachBlock(const DivergenceRows& rows, int64_t block_rows,
                  const std::function<void(const DivergenceBlock&, int64_t)>& visit) {
  block_rows = std::min(block_rows, rows.size());
  if (block_rows == 0) return;
  const int64_t columns = rows.columns();
  const auto buffer = [&] {
    return at::empty({block_rows, GradientPitch(columns)},
                     rows.student_hidden.options().dtype(rows.wide));
  };
  const at::Tensor student_dots = buffer();
  const at::Tensor teacher_dots = buffer();
  for (int64_t begin = 0; begin < rows.size(); begin += block_rows) {
    const int64_t size = std::min(block_rows, rows.size() - begin);
    const DivergenceRows part = rows.Slice(begin, size);
    DivergenceBlock block = {.kind = rows.kind,
                             .beta = rows.beta,
                             .student = rows.student,
                             .teacher = rows.teacher,
                             .student_dots = student_dots.narrow(0, 0, size).narrow(1, 0, columns),
                             .teacher_dots = teacher_dots.narrow(0, 0, size).narrow(1, 0, columns),
                             .temperature = part.temperature};
    WriteDots(part.student_hidden, part.student, rows.wide, block.student_dots);
    WriteDots(part.teacher_hidden, part.teacher, rows.wide, block.teacher_dots);
    visit(block, begin);
  }
}

void ForEachColumns(bool is_sixteen_bits, int64_t num_rows, int64_t num_columns,
                    const std::function<void(Columns)>& visit) {
  const int64_t step = is_sixteen_bits
                           ? num_columns
                           : std::max<int64_t>(kBlockLogits / std::max<int64_t>(num_rows, 1), 256);
  for (int64_t begin = 0; begin < num_columns; begin += step) {
    visit({begin, std::min(begin + step, num_columns)});
  }
}

}  // namespace logprobd::torch_ops
