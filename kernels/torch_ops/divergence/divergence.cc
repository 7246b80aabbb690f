// Implements the passes: the rows that are not masked are selected, their dot products with both
// weights computed for a block of rows at a time, and reduced to statistics and gradients.

#include "kernels/torch_ops/divergence/divergence.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "kernels/torch_ops/divergence/row_divergence.h"
#include "kernels/torch_ops/paths/logits.h"
#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {
namespace {

/// Blocks of fewer rows make the products slower, because each reads both weights.
constexpr int64_t kLogitRowsMin = 1'024;
/// Blocks of more rows do not make the products faster.
constexpr int64_t kLogitRowsMax = 4'096;

// Arguments.

bool IsDtypeSupported(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

void CheckModel(const std::string& model, const at::Tensor& hidden, const at::Tensor& weight,
                const MaybeTensor& bias, double scale, double softcap) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) > 0, model,
                    "_weight has the shape ", weight.sizes(),
                    ": it must be [vocabulary, hidden size] and complete; gather the weight first "
                    "when its parameters are sharded");
  TORCH_CHECK_VALUE(hidden.dim() >= 1 && hidden.size(-1) == weight.size(1), model,
                    "_hidden has the shape ", hidden.sizes(), " but ", model,
                    "_weight has the shape ", weight.sizes(),
                    ": their last dimensions must be equal");
  TORCH_CHECK_VALUE(IsDtypeSupported(hidden) && IsDtypeSupported(weight), model, "_hidden is ",
                    hidden.scalar_type(), " and ", model, "_weight is ", weight.scalar_type(),
                    ": float32, bfloat16, float16 and float64 are supported");
  if (bias.has_value()) {
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == weight.size(0), model,
                      "_bias has the shape ", bias->sizes(), " but ", model, "_weight has ",
                      weight.size(0), " rows: the shape must be [", weight.size(0), "]");
    TORCH_CHECK_VALUE(bias->is_floating_point(), model, "_bias is ", bias->scalar_type(),
                      ": it must have a floating-point dtype");
  }
  TORCH_CHECK_VALUE(std::isfinite(scale) && scale != 0, model, "_scale is ", scale,
                    ": it must be finite and not 0");
  TORCH_CHECK_VALUE(softcap >= 0 && std::isfinite(softcap), model, "_softcap is ", softcap,
                    ": it must be above 0, or None for no cap");
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

void CheckArguments(const DivergenceInputs& inputs, const DivergenceOptions& options) {
  CheckDevices(inputs);
  CheckModel("student", inputs.student_hidden, inputs.student_weight, inputs.student_bias,
             options.student_scale, options.student_softcap);
  CheckModel("teacher", inputs.teacher_hidden, inputs.teacher_weight, inputs.teacher_bias,
             options.teacher_scale, options.teacher_softcap);
  CheckPerRow(inputs.teacher_hidden.select(-1, 0), "teacher_hidden without its last dimension",
              inputs.student_hidden);
  CheckPerRow(inputs.mask, "mask", inputs.student_hidden);
  CheckPerRow(inputs.row_temperature, "temperature", inputs.student_hidden);
  if (inputs.row_temperature.has_value()) {
    const at::Tensor& temperature = *inputs.row_temperature;
    TORCH_CHECK_VALUE(temperature.is_floating_point(), "temperature is ", temperature.scalar_type(),
                      ": it must have a floating-point dtype");
    // Reading a value on a GPU would wait for the GPU.
    TORCH_CHECK_VALUE(!temperature.is_cpu() || temperature.gt(0).all().item<bool>(),
                      "temperature has an element that is not above 0");
  }
  CheckVocabulary(inputs, options);
  TORCH_CHECK_VALUE(options.temperature > 0 && std::isfinite(options.temperature),
                    "temperature is ", options.temperature, ": it must be above 0 and finite");
  TORCH_CHECK_VALUE(
      options.kind >= DivergenceKind::kForwardKl && options.kind <= DivergenceKind::kJsd,
      "kind is ", static_cast<int64_t>(options.kind), ": it must be 0, 1 or 2");
  TORCH_CHECK_VALUE(options.kind != DivergenceKind::kJsd || (options.beta > 0 && options.beta < 1),
                    "beta is ", options.beta,
                    ": it must be above 0 and below 1; use a KL divergence for the limits");
  TORCH_CHECK_VALUE(options.block_bytes >= 0, "block_bytes is ", options.block_bytes,
                    ": it must not be negative");
}

// Rows and blocks.

/// The rows that a pass computes, as a subset of all rows.
struct SelectedRows {
  at::Tensor indices;  ///< int64 [n], ascending; undefined: all rows.
  int64_t num_all = 0;

  int64_t size() const { return indices.defined() ? indices.size(0) : num_all; }
  at::Tensor Gather(const at::Tensor& values) const {
    return indices.defined() ? values.index_select(0, indices) : values;
  }
  /// Returns `values` [n, ...] as values of all rows. The other rows hold 0.
  at::Tensor Scatter(const at::Tensor& values) const {
    if (!indices.defined()) return values;
    std::vector<int64_t> shape = values.sizes().vec();
    shape.front() = num_all;
    return at::zeros(shape, values.options()).index_copy_(0, indices, values);
  }
};

/// Returns the rows where `is_selected`, bool [all rows], holds; undefined: all rows.
SelectedRows Select(const at::Tensor& is_selected, int64_t num_all) {
  SelectedRows rows = {.indices = {}, .num_all = num_all};
  if (!is_selected.defined()) return rows;
  const at::Tensor indices = at::nonzero(is_selected).squeeze(1);
  if (indices.size(0) < num_all) rows.indices = indices;
  return rows;
}

at::Tensor FlatRows(const at::Tensor& hidden) {
  return hidden.dim() == 2 ? hidden : hidden.reshape({-1, hidden.size(-1)});
}

at::Tensor FlatMask(const DivergenceInputs& inputs) {
  return inputs.mask.has_value() ? Flat(*inputs.mask) != 0 : at::Tensor();
}

bool IsCapturing(const DivergenceInputs& inputs) {
  const at::Device device = inputs.student_hidden.device();
  return DeviceOps::For(device.type()).IsCapturing(device);
}

/// Returns the coefficients, 0 where the mask is 0. Needed only while a CUDA graph is captured,
/// when masked rows are computed.
at::Tensor WithoutMasked(const at::Tensor& values, const at::Tensor& mask) {
  return mask.defined() ? at::where(mask, values, 0) : values;
}

/// The selected rows of both models, and their heads.
struct DivergenceRows {
  at::Tensor student_hidden;  ///< [n, H_s]
  at::Tensor teacher_hidden;  ///< [n, H_t]
  at::Tensor temperature;     ///< fp64 [n, 1]
  DivergenceKind kind;
  double beta;
  DivergenceHead student;
  DivergenceHead teacher;
  at::ScalarType wide;

  int64_t size() const { return student_hidden.size(0); }
  int64_t columns() const { return student.weight.size(0); }
  DivergenceRows Slice(int64_t begin, int64_t size) const {
    DivergenceRows slice = *this;
    slice.student_hidden = SliceRows(student_hidden, begin, size);
    slice.teacher_hidden = SliceRows(teacher_hidden, begin, size);
    slice.temperature = SliceRows(temperature, begin, size);
    return slice;
  }
  bool are_gradients_in_sixteen_bits() const {
    return IsMultipliedInSixteenBits(student_hidden, student.weight);
  }
  at::ScalarType gradient_dtype() const {
    return are_gradients_in_sixteen_bits() ? student.weight.scalar_type() : wide;
  }
  const RowDivergence& ops() const {
    return RowDivergence::For(student_hidden.device().type(), wide);
  }
  DivergenceRowBytes row_bytes() const {
    return RowBytesOf(student_hidden.device(), student_hidden.scalar_type(),
                      student.weight.scalar_type(), wide, columns());
  }
};

DivergenceRows RowsOf(const SelectedRows& selected, const DivergenceInputs& inputs,
                      const DivergenceOptions& options) {
  const int64_t columns =
      options.vocab_valid > 0 ? options.vocab_valid : inputs.student_weight.size(0);
  const at::ScalarType wide = WideDtype(inputs);
  const auto head = [&](const at::Tensor& weight, const MaybeTensor& bias, double scale,
                        double softcap) {
    DivergenceHead result = {SliceRows(weight, 0, columns), {}, scale, softcap};
    if (bias.has_value()) result.bias = SliceRows(*bias, 0, columns).to(wide).contiguous();
    return result;
  };
  DivergenceRows rows;
  rows.student_hidden = selected.Gather(FlatRows(inputs.student_hidden));
  rows.teacher_hidden = selected.Gather(FlatRows(inputs.teacher_hidden));
  rows.temperature =
      inputs.row_temperature.has_value()
          ? selected.Gather(Flat(*inputs.row_temperature)).to(at::kDouble).contiguous().unsqueeze(1)
          : at::full({selected.size(), 1}, options.temperature,
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

/// Numbers of rows that exist at a time.
struct BlockRows {
  int64_t logits;     ///< Rows whose logits exist.
  int64_t gradients;  ///< Rows whose gradients exist until they are multiplied; >= logits.
};

/// Returns the rows of each of the fewest equal blocks of at most `rows_max` rows, of at least one.
int64_t EqualBlocks(int64_t num_rows, int64_t rows_max) {
  rows_max = std::clamp<int64_t>(rows_max, 1, std::max<int64_t>(num_rows, 1));
  const int64_t num_blocks = std::max<int64_t>((num_rows + rows_max - 1) / rows_max, 1);
  constexpr int64_t kAlignment = 128;  // rows of a tile of the products
  const int64_t rows = (num_rows + num_blocks - 1) / num_blocks;
  return std::min(rows_max, (rows + kAlignment - 1) / kAlignment * kAlignment);
}

/// Divides `num_rows` rows into blocks within `bytes`. The gradients of all rows exist at a time if
/// logits of enough rows fit beside them: the weight's gradient is then written once.
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

// Products.

/// Calls `visit` with blocks of columns: with all of them if factors are multiplied in 16 bits,
/// otherwise with few enough that conversions take little memory.
void ForEachColumns(bool is_sixteen_bits, int64_t num_rows, int64_t num_columns,
                    const std::function<void(Columns)>& visit) {
  const int64_t step = is_sixteen_bits
                           ? num_columns
                           : std::max<int64_t>(kBlockLogits / std::max<int64_t>(num_rows, 1), 256);
  for (int64_t begin = 0; begin < num_columns; begin += step) {
    visit({begin, std::min(begin + step, num_columns)});
  }
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

/// Computes the dot products of the rows, `block_rows` rows at a time, and calls `visit` with each
/// block and its first row.
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

at::Tensor EmptyGradients(int64_t num_rows, const DivergenceRows& rows) {
  return at::empty({num_rows, GradientPitch(rows.columns())},
                   rows.student_hidden.options().dtype(rows.gradient_dtype()));
}

/// Sums of the gradients of the student's tensors over the rows of a pass.
class StudentGradients {
 public:
  /// `is_at_once`: all rows are added by one call of Add.
  StudentGradients(const DivergenceInputs& inputs, const DivergenceRows& rows, GradientNeeds needs,
                   bool is_at_once)
      : inputs_(inputs), wide_(rows.wide) {
    const auto options = inputs.student_hidden.options();
    const at::Tensor& weight = inputs.student_weight;
    if (needs.hidden) {
      hidden_ = at::empty({rows.size(), weight.size(1)}, options.dtype(wide_));
    }
    if (needs.weight) {
      weight_ = at::empty(weight.sizes(), options.dtype(is_at_once ? weight.scalar_type() : wide_));
      const int64_t columns = rows.size() > 0 ? rows.columns() : 0;
      weight_.narrow(0, columns, weight.size(0) - columns).zero_();
    }
    if (needs.bias) bias_ = at::zeros({weight.size(0)}, options.dtype(wide_));
  }

  /// Adds the gradients of `rows`, which begin at row `begin` of the pass. `gradient` [n, columns]
  /// is the gradient with respect to the dot products, and is still to be multiplied by `factors`
  /// [n, 1] if these are defined.
  void Add(const DivergenceRows& rows, int64_t begin, const at::Tensor& gradient,
           const at::Tensor& factors) {
    const at::Tensor hidden_sum =
        hidden_.defined() ? SliceRows(hidden_, begin, rows.size()) : hidden_;
    at::Tensor hidden = rows.student_hidden;
    if (factors.defined() && weight_.defined()) {
      hidden = hidden * factors;
      if (rows.are_gradients_in_sixteen_bits()) hidden = hidden.to(gradient.scalar_type());
    }
    const auto add_columns = [&](Columns columns) {
      const at::Tensor part = gradient.narrow(1, columns.begin, columns.size());
      if (hidden_sum.defined()) {
        MultiplyInto(hidden_sum, columns.begin == 0 ? Into::kReplace : Into::kAddTo, part,
                     SliceRows(rows.student.weight, columns.begin, columns.size()), wide_);
      }
      if (weight_.defined()) {
        MultiplyInto(SliceRows(weight_, columns.begin, columns.size()),
                     begin == 0 ? Into::kReplace : Into::kAddTo, part.t(), hidden, wide_);
      }
      if (bias_.defined()) AddBias(rows, columns, part, factors);
    };
    ForEachColumns(rows.are_gradients_in_sixteen_bits(), rows.size(), rows.columns(), add_columns);
    if (hidden_sum.defined() && factors.defined()) hidden_sum.mul_(factors);
  }

  /// Returns the gradients of all rows in the inputs' dtypes. `selected` are the rows of the pass.
  InputGradients Result(const SelectedRows& selected) const {
    const auto none = [](const at::Tensor& like) { return at::empty({0}, like.options()); };
    const at::Tensor& hidden = inputs_.student_hidden;
    const at::Tensor& weight = inputs_.student_weight;
    InputGradients gradients = {none(hidden), none(weight),
                                none(inputs_.student_bias.value_or(weight))};
    if (hidden_.defined()) {
      gradients.hidden = selected.Scatter(hidden_.to(hidden.scalar_type())).view(hidden.sizes());
    }
    if (weight_.defined()) gradients.weight = weight_.to(weight.scalar_type());
    if (bias_.defined()) gradients.bias = bias_.to(inputs_.student_bias->scalar_type());
    return gradients;
  }

 private:
  /// The gradient of the dot products has the scale as a factor, which the bias's gradient lacks.
  void AddBias(const DivergenceRows& rows, Columns columns, const at::Tensor& part,
               const at::Tensor& factors) const {
    constexpr int64_t kStep = 4'096;  // The parts are widened.
    for (int64_t begin = 0; begin < columns.size(); begin += kStep) {
      const int64_t size = std::min(kStep, columns.size() - begin);
      at::Tensor values = part.narrow(1, begin, size).to(wide_);
      if (factors.defined()) values = values * factors;
      bias_.narrow(0, columns.begin + begin, size).add_(values.sum(0), 1 / rows.student.scale);
    }
  }

  const DivergenceInputs& inputs_;
  const at::ScalarType wide_;
  at::Tensor hidden_;  // [n, H] in the wide dtype, or undefined
  at::Tensor weight_;  // [V, H] or undefined
  at::Tensor bias_;    // [V] in the wide dtype, or undefined
};

/// Computes the gradients of the rows: with `computes_statistics` writes their statistics first,
/// otherwise reads them.
InputGradients Differentiate(const SelectedRows& selected, const DivergenceRows& rows,
                             const at::Tensor& statistics, bool computes_statistics,
                             const DivergenceCoefficients& coefficients,
                             const DivergenceInputs& inputs, const DivergenceOptions& options,
                             GradientNeeds needs) {
  const BlockRows blocks = BlocksWithin(options.block_bytes, rows.size(), rows.row_bytes());
  StudentGradients sums(inputs, rows, needs, /*is_at_once=*/blocks.gradients >= rows.size());
  const at::Tensor buffer = EmptyGradients(std::min(blocks.gradients, rows.size()), rows);
  const RowDivergence& ops = rows.ops();
  for (int64_t begin = 0; begin < rows.size(); begin += blocks.gradients) {
    const int64_t size = std::min(blocks.gradients, rows.size() - begin);
    const DivergenceRows chunk = rows.Slice(begin, size);
    const at::Tensor gradient = buffer.narrow(0, 0, size).narrow(1, 0, rows.columns());
    ForEachBlock(chunk, blocks.logits, [&](const DivergenceBlock& block, int64_t first) {
      const int64_t num_rows = block.student_dots.size(0);
      const at::Tensor block_statistics = statistics.narrow(0, begin + first, num_rows);
      if (computes_statistics) ops.Sum(block, block_statistics);
      ops.FormGradient(block, block_statistics, coefficients.Slice(begin + first, num_rows),
                       gradient.narrow(0, first, num_rows));
    });
    sums.Add(chunk, begin, gradient, /*factors=*/{});
  }
  return sums.Result(selected);
}

/// Returns a column of the statistics as a result for all rows, shaped like the inputs' rows.
at::Tensor ResultOf(const at::Tensor& statistics, DivergenceStatistic column,
                    const DivergenceInputs& inputs) {
  const auto shape = inputs.student_hidden.sizes();
  return statistics.select(1, column).to(WideDtype(inputs)).view(shape.slice(0, shape.size() - 1));
}

at::Tensor EmptyStatistics(int64_t num_rows, const DivergenceInputs& inputs) {
  return at::empty({num_rows, kNumStatistics}, inputs.student_hidden.options().dtype(at::kDouble));
}

/// Returns the statistics of the selected rows as those of all rows. Masked rows hold zeros.
at::Tensor OfAllRows(const at::Tensor& statistics, const SelectedRows& selected,
                     const at::Tensor& captured_mask) {
  const at::Tensor all = selected.Scatter(statistics);
  return captured_mask.defined() ? at::where(captured_mask.unsqueeze(1), all, 0) : all;
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
  const at::Device device = inputs.student_hidden.device();
  ForEachField<DivergenceInputs>([&](const auto& field) {
    const MaybeTensor tensor = inputs.*field.member;
    TORCH_CHECK_VALUE(!tensor.has_value() || tensor->device() == device, field.name, " is on ",
                      tensor->device(), ", but student_hidden is on ", device,
                      ": both must be on the same device");
  });
}

DivergenceOutputs ForwardDivergence(const DivergenceInputs& inputs,
                                    const DivergenceOptions& options) {
  // Autocast must not change the dtypes that are chosen here.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  CheckArguments(inputs, options);
  const at::Tensor mask = FlatMask(inputs);
  const bool is_capturing = IsCapturing(inputs);
  const int64_t num_all = inputs.student_hidden.numel() / inputs.student_hidden.size(-1);
  const SelectedRows selected = Select(is_capturing ? at::Tensor() : mask, num_all);
  const DivergenceRows rows = RowsOf(selected, inputs, options);
  const DivergenceRowBytes row_bytes = rows.row_bytes();
  const bool is_cached = options.keep_gradient != GradientCacheKind::kNone;
  TORCH_CHECK_VALUE(!is_cached || options.keep_gradient == row_bytes.cache_kind,
                    "keep_gradient is ", static_cast<int64_t>(options.keep_gradient),
                    ": it must be 0 or ", static_cast<int64_t>(row_bytes.cache_kind),
                    " for these inputs");
  DivergenceOutputs outputs;
  outputs.cache = is_cached ? EmptyGradients(num_all, rows)
                            : at::empty({0}, inputs.student_hidden.options().dtype(rows.wide));
  const at::Tensor statistics = EmptyStatistics(rows.size(), inputs);
  const RowDivergence& ops = rows.ops();
  const BlockRows blocks = BlocksWithin(options.block_bytes, rows.size(),
                                        {row_bytes.logits, /*gradient=*/0, row_bytes.cache_kind});
  const DivergenceCoefficients ones = {at::ones({rows.size(), 1}, statistics.options()),
                                       /*entropy=*/{}};
  ForEachBlock(rows, blocks.logits, [&](const DivergenceBlock& block, int64_t begin) {
    const int64_t size = block.student_dots.size(0);
    const at::Tensor block_statistics = statistics.narrow(0, begin, size);
    ops.Sum(block, block_statistics);
    if (!is_cached) return;
    ops.FormGradient(block, block_statistics, ones.Slice(begin, size),
                     outputs.cache.narrow(0, begin, size).narrow(1, 0, rows.columns()));
  });
  outputs.statistics = OfAllRows(statistics, selected, is_capturing ? mask : at::Tensor());
  outputs.divergence = ResultOf(outputs.statistics, kDivergence, inputs);
  outputs.entropy = ResultOf(outputs.statistics, kEntropy, inputs);
  return outputs;
}

InputGradients BackwardDivergence(const DivergenceUpstream& upstream,
                                  const DivergenceInputs& inputs, const DivergenceOptions& options,
                                  GradientNeeds needs) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor mask = FlatMask(inputs);
  const bool is_capturing = IsCapturing(inputs);
  const int64_t num_all = inputs.student_hidden.numel() / inputs.student_hidden.size(-1);
  const auto flat = [&](const MaybeTensor& values) {
    if (!values.has_value()) return at::Tensor();
    const at::Tensor wide = Flat(*values).to(at::kDouble);
    return is_capturing ? WithoutMasked(wide, mask) : wide;
  };
  const at::Tensor d_divergence = flat(upstream.divergence);
  const at::Tensor d_entropy = flat(upstream.entropy);
  at::Tensor is_selected;
  if (!is_capturing) {
    is_selected = at::zeros({num_all}, inputs.student_hidden.options().dtype(at::kBool));
    if (d_divergence.defined()) is_selected.logical_or_(d_divergence != 0);
    if (d_entropy.defined()) is_selected.logical_or_(d_entropy != 0);
    if (mask.defined()) is_selected.logical_and_(mask);
  }
  const SelectedRows selected = Select(is_selected, num_all);
  const DivergenceRows rows = RowsOf(selected, inputs, options);
  const auto gather = [&](const at::Tensor& values) {
    return values.defined() ? selected.Gather(values).contiguous().unsqueeze(1) : values;
  };
  const DivergenceCoefficients coefficients = {gather(d_divergence), gather(d_entropy)};
  if (!upstream.cache.has_value() || d_entropy.defined()) {
    return Differentiate(selected, rows, selected.Gather(upstream.statistics).contiguous(),
                         /*computes_statistics=*/false, coefficients, inputs, options, needs);
  }
  at::Tensor gradient = *upstream.cache;
  if (selected.indices.defined()) {
    // The cache holds the rows of the mask, one after another.
    const at::Tensor cached = mask.defined()
                                  ? mask.cumsum(0).index_select(0, selected.indices).sub_(1)
                                  : selected.indices;
    const bool is_every_cached_row =
        mask.defined() && mask.sum().item<int64_t>() == selected.size();
    gradient = is_every_cached_row ? gradient.narrow(0, 0, selected.size())
                                   : gradient.index_select(0, cached);
  }
  StudentGradients sums(inputs, rows, needs, /*is_at_once=*/rows.size() <= kBlockRows);
  for (int64_t begin = 0; begin < rows.size(); begin += kBlockRows) {
    const int64_t size = std::min(kBlockRows, rows.size() - begin);
    sums.Add(rows.Slice(begin, size), begin,
             SliceRows(gradient, begin, size).narrow(1, 0, rows.columns()),
             SliceRows(coefficients.divergence, begin, size).to(rows.wide));
  }
  return sums.Result(selected);
}

DivergenceLoss ForwardDivergenceLoss(const DivergenceInputs& inputs,
                                     const DivergenceOptions& options,
                                     const MaybeTensor& row_weights, bool is_mean,
                                     GradientNeeds needs) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  CheckArguments(inputs, options);
  CheckPerRow(row_weights, "row_weights", inputs.student_hidden);
  TORCH_CHECK_VALUE(!row_weights.has_value() || row_weights->is_floating_point(), "row_weights is ",
                    row_weights->scalar_type(), ": it must have a floating-point dtype");
  TORCH_CHECK_VALUE(
      !row_weights.has_value() || row_weights->device() == inputs.student_hidden.device(),
      "row_weights is on ", row_weights->device(), ", but student_hidden is on ",
      inputs.student_hidden.device(), ": both must be on the same device");
  const at::Tensor mask = FlatMask(inputs);
  const at::Tensor captured_mask = IsCapturing(inputs) ? mask : at::Tensor();
  const int64_t num_all = inputs.student_hidden.numel() / inputs.student_hidden.size(-1);
  const SelectedRows selected = Select(captured_mask.defined() ? at::Tensor() : mask, num_all);
  const DivergenceRows rows = RowsOf(selected, inputs, options);
  const at::Tensor statistics = EmptyStatistics(rows.size(), inputs);
  at::Tensor weights = row_weights.has_value() ? selected.Gather(Flat(*row_weights)).to(at::kDouble)
                                               : at::ones({rows.size()}, statistics.options());
  weights = WithoutMasked(weights, captured_mask);
  if (is_mean && captured_mask.defined()) {
    weights = weights / captured_mask.sum().clamp_min(1);
  } else if (is_mean) {
    weights = weights / static_cast<double>(std::max<int64_t>(rows.size(), 1));
  }
  DivergenceLoss result;
  if (needs.any()) {
    result.gradients =
        Differentiate(selected, rows, statistics, /*computes_statistics=*/true,
                      {weights.contiguous().unsqueeze(1), /*entropy=*/{}}, inputs, options, needs);
  } else {
    const auto none = at::empty({0}, inputs.student_hidden.options());
    result.gradients = {none, none, none};
    const DivergenceRowBytes row_bytes = rows.row_bytes();
    const BlockRows blocks =
        BlocksWithin(options.block_bytes, rows.size(), {row_bytes.logits, 0, row_bytes.cache_kind});
    ForEachBlock(rows, blocks.logits, [&](const DivergenceBlock& block, int64_t begin) {
      rows.ops().Sum(block, statistics.narrow(0, begin, block.student_dots.size(0)));
    });
  }
  const at::Tensor divergence = statistics.select(1, kDivergence);
  result.loss = at::where(weights == 0, 0, weights * divergence).sum().to(rows.wide);
  const at::Tensor all = OfAllRows(statistics, selected, captured_mask);
  result.divergence = ResultOf(all, kDivergence, inputs);
  result.entropy = ResultOf(all, kEntropy, inputs);
  return result;
}

}  // namespace logprobd::torch_ops
