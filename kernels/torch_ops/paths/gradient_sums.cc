#include "kernels/torch_ops/paths/gradient_sums.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/common/tile.h"
#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/rows/shard.h"

namespace logprobd::torch_ops {
namespace {

/// Multiplies `gradient`, [n, columns], the gradient of the dot products, by the weight's rows for
/// these columns and adds the product to `sum`. The first block of columns replaces `sum` instead.
void AddHiddenProduct(const at::Tensor& gradient, Columns columns, const Problem& problem,
                      const at::Tensor& sum) {
  const at::Tensor weight = SliceRows(problem.inputs.weight, columns.begin, columns.size());
  MultiplyInto(sum, columns.begin == 0 ? Into::kReplace : Into::kAddTo, gradient, weight,
               problem.wide);
}

int64_t BytesOf(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

/// Rows [begin, begin + size).
struct RowRange {
  int64_t begin;
  int64_t size;
};

/// Divides the rows into blocks. Rows with cached exponentials form blocks of their own, so that
/// their gradients can overwrite the exponentials, and come last.
std::vector<RowRange> BlocksOf(const BackwardRows& all) {
  const int64_t num_rows = all.rows.size();
  const int64_t num_apart = all.cached.has_logits() ? 0 : std::min(all.cached.size(), num_rows);
  std::vector<RowRange> blocks;
  const auto append = [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kBlockRows) {
      blocks.push_back({begin, std::min(kBlockRows, end - begin)});
    }
  };
  append(num_apart, num_rows);
  append(0, num_apart);
  return blocks;
}

/// Returns whether the blocks' products are summed before they are rounded to the dtype of the
/// weight's gradient. Otherwise that gradient has the wide dtype, and each block adds to it.
bool AreRoundedTogether(int64_t num_rows, const Problem& problem, const GradientSums& sums) {
  return sums.weight.defined() && sums.weight.scalar_type() != problem.wide &&
         AreAddedAtOnce(num_rows);
}

/// A block of rows whose gradients are formed, some columns at a time.
class Block {
 public:
  /// `column_bytes` is DotGradientsArguments::column_bytes_beside. `listed` is prepared for all
  /// rows.
  Block(const BackwardRows& all, RowRange range, const Problem& problem, const GradientSums& sums,
        const ListedGradients& listed, int64_t column_bytes)
      : begin_(range.begin),
        rows_(all.Slice(range.begin, range.size)),
        problem_(problem),
        listed_(listed),
        gradients_(problem.path->MakeDotGradients({rows_, problem, sums.bias, column_bytes})),
        factors_(gradients_->RowFactors()) {
    if (sums.weight.defined()) hidden_terms_ = gradients_->HiddenTerms();
    if (!sums.hidden.defined()) return;
    hidden_gradient_ = SliceRows(sums.hidden, begin_, rows_.rows.size());
    if (problem.shard.columns == 0) hidden_gradient_.zero_();
    const bool is_rounded = hidden_gradient_.scalar_type() != problem.wide;
    hidden_sum_ = is_rounded ? at::empty(hidden_gradient_.sizes(),
                                         hidden_gradient_.options().dtype(problem.wide))
                             : hidden_gradient_;
  }

  /// Forms the gradient of the columns that follow formed() and adds its product to hidden's sum.
  /// Returns false if the row compaction has found no rows.
  [[nodiscard]] bool FormNext() {
    formed_ = gradients_->Next(formed_.end);
    gradient_ = gradients_->Form(formed_);
    const int64_t num_rows = gradient_.size(0);
    if (num_rows == 0) return false;
    listed_.Write(gradient_, formed_, begin_);
    if (!hidden_sum_.defined()) return true;
    at::Tensor sum = SliceRows(hidden_sum_, 0, num_rows);
    AddHiddenProduct(gradient_, formed_, problem_, sum);
    if (!is_complete()) return true;
    if (factors_.defined()) problem_.device_ops->MultiplyRows(sum, factors_, sum);
    if (!hidden_sum_.is_same(hidden_gradient_)) SliceRows(hidden_gradient_, 0, num_rows).copy_(sum);
    return true;
  }

  /// Adds the products of some of the columns formed() with the hidden states to `sum`, [columns,
  /// H].
  void AddWeightProducts(Columns columns, const at::Tensor& sum, Into into) const {
    const at::Tensor gradient = gradient_.narrow(1, columns.begin - formed_.begin, columns.size());
    for (const at::Tensor& term : hidden_terms_) {
      MultiplyInto(sum, std::exchange(into, Into::kAddTo), gradient.t(),
                   SliceRows(term, 0, gradient.size(0)), problem_.wide);
    }
  }

  /// The columns whose gradient FormNext has formed last; {0, 0} before.
  Columns formed() const { return formed_; }
  bool is_complete() const { return formed_.end == problem_.shard.columns; }
  /// Returns whether one call of FormNext forms the gradient of all columns.
  bool forms_all_at_once() const { return gradients_->Next(0).end == problem_.shard.columns; }

 private:
  const int64_t begin_;
  const BackwardRows rows_;
  const Problem& problem_;
  const ListedGradients& listed_;
  const std::unique_ptr<DotGradients> gradients_;
  const at::Tensor factors_;
  std::vector<at::Tensor> hidden_terms_;  // empty if the weight's gradient is not needed
  at::Tensor hidden_gradient_;            // undefined if not needed
  at::Tensor hidden_sum_;                 // in the wide dtype
  Columns formed_ = {0, 0};
  at::Tensor gradient_;
};

/// Adds the gradients of blocks of rows. The products of several blocks are summed in the wide
/// dtype before they are added to the weight's sum, which is rounded once.
class BlockGroup {
 public:
  BlockGroup(const Problem& problem, GradientSums& sums) : problem_(problem), sums_(sums) {}

  void Append(std::unique_ptr<Block> block) { blocks_.push_back(std::move(block)); }
  /// Returns whether the block appended last forms the gradient of all columns at once, as one that
  /// overwrites a cache does.
  bool FormsLastAtOnce() const { return blocks_.back()->forms_all_at_once(); }

  /// Calls `when_hidden_is_complete` (if any, and if hidden's gradient is needed) as soon as all
  /// additions to hidden's sum are enqueued. Returns false if the row compaction has found no rows.
  [[nodiscard]] bool Add(const std::function<bool()>& when_hidden_is_complete) {
    const int64_t num_columns = problem_.shard.columns;
    for (Columns columns = {0, 0}; columns.end < num_columns;) {
      columns = {columns.end, num_columns};
      bool is_summing_hidden = false;
      for (const auto& block : blocks_) {
        if (block->formed().end == columns.begin) {
          if (!block->FormNext()) return false;
          const bool is_hidden_complete = sums_.hidden.defined() && AreComplete();
          if (is_hidden_complete && when_hidden_is_complete) {
            is_summing_hidden = when_hidden_is_complete() && problem_.device().is_cuda();
          }
        }
        columns.end = std::min(columns.end, block->formed().end);
      }
      if (!sums_.weight.defined()) continue;
      // The kernel of hidden's sum over the ranks finds room on a GPU only between two products.
      const Columns first = {columns.begin, is_summing_hidden ? FirstOf(columns) : columns.end};
      AddToWeight(first);
      if (first.end < columns.end) AddToWeight({first.end, columns.end});
    }
    sums_.weight_into = Into::kAddTo;
    return true;
  }

 private:
  /// Returns the end of the first whole tiles of columns, about an eighth.
  static int64_t FirstOf(Columns columns) {
    constexpr int64_t kTile = kernels::kTileColumns;
    return std::min(columns.begin + (columns.size() / (8 * kTile) + 1) * kTile, columns.end);
  }

  bool AreComplete() const {
    return std::all_of(blocks_.begin(), blocks_.end(),
                       [](const auto& block) { return block->is_complete(); });
  }

  void AddToWeight(Columns columns) const {
    const at::Tensor sum = SliceRows(sums_.weight, columns.begin, columns.size());
    if (blocks_.size() == 1) {
      return blocks_.front()->AddWeightProducts(columns, sum, sums_.weight_into);
    }
    const at::Tensor wide = at::empty(sum.sizes(), sum.options().dtype(problem_.wide));
    Into into = Into::kReplace;
    for (const auto& block : blocks_) {
      block->AddWeightProducts(columns, wide, std::exchange(into, Into::kAddTo));
    }
    if (sums_.weight_into == Into::kReplace) {
      sum.copy_(wide);
    } else {
      at::Tensor(sum).add_(wide);
    }
  }

  const Problem& problem_;
  GradientSums& sums_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

}  // namespace

bool AreAddedAtOnce(int64_t num_rows) { return num_rows <= kBlockRows; }

GradientSums AllocateSums(const Problem& problem, GradientNeeds needs,
                          const MaybeTensor& weight_grad, int64_t num_rows, bool is_added_at_once) {
  const at::Tensor& weight = problem.inputs.weight;
  const auto wide = problem.inputs.hidden.options().dtype(problem.wide);
  GradientSums sums;
  if (needs.hidden) {
    const bool is_rounded_by_block = !is_added_at_once && !problem.sums_hidden_gradient();
    sums.hidden = at::empty({num_rows, weight.size(1)},
                            is_rounded_by_block ? problem.inputs.hidden.options() : wide);
  }
  if (needs.bias) sums.bias = at::zeros({weight.size(0)}, wide);
  if (!needs.weight) return sums;
  if (weight_grad.has_value()) {
    sums.weight = *weight_grad;
    return sums;
  }
  sums.weight = at::empty(weight.sizes(), is_added_at_once ? weight.options() : wide);
  const int64_t padding = weight.size(0) - problem.shard.columns;
  if (padding > 0) sums.weight.narrow(0, problem.shard.columns, padding).zero_();
  sums.weight_into = Into::kReplace;
  return sums;
}

void AddGradients(const BackwardRows& all, const Problem& problem, GradientSums& sums,
                  const ListedGradients& listed,
                  const std::function<bool()>& when_hidden_is_complete) {
  const std::vector<RowRange> blocks = BlocksOf(all);
  const size_t group_size = AreRoundedTogether(all.rows.size(), problem, sums) ? blocks.size() : 1;
  for (size_t first = 0; first < blocks.size(); first += group_size) {
    const bool is_last = first + group_size == blocks.size();
    BlockGroup group(problem, sums);
    // Bytes per column of the group's gradients that do not overwrite a cache, and of their sum.
    const int64_t gradient_bytes = BytesOf(problem.inputs.weight.scalar_type());
    int64_t column_bytes = 0;
    if (group_size > 1) {
      column_bytes =
          problem.hidden_size() * BytesOf(problem.wide) + all.rows.size() * gradient_bytes;
    }
    for (size_t i = first + group_size; i-- > first;) {
      const int64_t own = blocks[i].size * gradient_bytes;
      group.Append(std::make_unique<Block>(all, blocks[i], problem, sums, listed,
                                           std::max<int64_t>(column_bytes - own, 0)));
      if (group.FormsLastAtOnce()) column_bytes -= own;
    }
    if (!group.Add(is_last ? when_hidden_is_complete : nullptr)) return;
  }
  if (sums.bias.defined()) listed.AddToBias(sums.bias);
}

void ReserveHiddenSum(const Problem& problem) {
  const auto wide = problem.inputs.hidden.options().dtype(problem.wide);
  const int64_t num_rows = problem.num_rows();
  const at::Tensor all = at::empty({num_rows, problem.hidden_size()}, wide);
  if (!problem.options.parallel.sequence_parallel) return;
  at::empty({num_rows / problem.group.size(), problem.hidden_size()}, wide);
}

RankGroup::PendingSum StartHiddenSum(const at::Tensor& hidden, const at::Tensor& row_indices,
                                     const Problem& problem) {
  // A gradient that is not summed is rounded before it is scattered, which takes half the memory.
  const bool is_summed = problem.sums_hidden_gradient();
  const at::Tensor part = is_summed ? hidden : hidden.to(problem.inputs.hidden.scalar_type());
  Rows rows;
  rows.row_indices = row_indices;
  rows.num_all = problem.num_rows();
  const RankGroup& ranks = is_summed ? problem.group : RankGroup::Alone();
  return ranks.StartSum(rows.ScatterToAll(part), problem.options.parallel.sequence_parallel);
}

InputGradients ToInputGradients(const std::optional<RankGroup::PendingSum>& hidden_sum,
                                const GradientSums& sums, const LinearLogprobInputs& inputs) {
  InputGradients gradients =
      EmptyGradients(inputs.hidden, inputs.weight, inputs.bias, GradientNeeds::None());
  if (hidden_sum.has_value()) {
    gradients.hidden =
        hidden_sum->Result().to(inputs.hidden.scalar_type()).view(inputs.hidden.sizes());
  }
  if (sums.weight.defined()) {
    // If there were no rows, nothing has been written.
    if (sums.weight_into == Into::kReplace) at::Tensor(sums.weight).zero_();
    gradients.weight = sums.weight.to(inputs.weight.scalar_type());
  }
  if (sums.bias.defined()) gradients.bias = sums.bias.to(inputs.bias->scalar_type());
  return gradients;
}

}  // namespace logprobd::torch_ops
