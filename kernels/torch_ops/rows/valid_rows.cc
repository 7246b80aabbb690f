#include "kernels/torch_ops/rows/valid_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/zeros.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/Exception.h>

#include <vector>

#include "kernels/torch_ops/rows/device_ops.h"

namespace logprobd::torch_ops {

at::Tensor InPlainLayout(const at::Tensor& rows) {
  constexpr uintptr_t kAlignment = 16;
  const bool is_plain =
      rows.is_contiguous() && reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kAlignment == 0;
  return is_plain ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

RowSubset RowSubset::Resolved() const { return pending == nullptr ? *this : pending->Result(); }

RowSubset CompactRows(const Pass& pass, const at::Tensor& target, const UpstreamGradients& upstream,
                      IdRange ids, Wait wait) {
  if (pass.device_ops->IsCapturing(target.device())) return {.is_unchecked = true};
  return pass.device_ops->CompactRows(target, pass.options.ignore_index, upstream, ids, wait);
}

RowSubset CompactValidRows(const Pass& pass, const UpstreamGradients& upstream, Wait wait) {
  const at::Tensor target = FlatTarget(pass.inputs);
  if (!pass.is_alone) {
    // Another rank may have the target, whatever it is.
    return CompactRows(pass, target, upstream, /*ids=*/{}, wait);
  }
  RowSubset subset = CompactRows(pass, target, upstream, pass.shard.ids(), wait);
  CheckTargets(subset, target, pass);
  return subset;
}

at::Tensor FlatTarget(const LinearLogprobInputs& inputs) {
  return Flat(inputs.target).to(at::kLong);
}

at::Tensor Rows::target() const { return GatherFromAll(all_targets); }

Rows Rows::Resolved() const {
  if (pending == nullptr) return *this;
  const RowSubset& subset = pending->Result();
  Rows rows = *this;
  rows.pending.reset();
  rows.num_out_of_vocab = subset.num_out_of_vocab;
  rows.row_indices = subset.row_indices;
  if (!subset.row_indices.defined()) return rows;
  const int64_t count = subset.row_indices.size(0);
  rows.hidden = SliceRows(hidden, 0, count);
  if (temperature.defined()) rows.temperature = SliceRows(temperature, 0, count);
  return rows;
}

at::Tensor Rows::ScatterToAll(const at::Tensor& values) const {
  if (!row_indices.defined()) return values;
  std::vector<int64_t> shape = values.sizes().vec();
  shape.front() = num_all;
  return at::zeros(shape, values.options()).index_copy_(0, row_indices, values);
}

at::Tensor Rows::GatherFromAll(const at::Tensor& values) const {
  return row_indices.defined() ? values.index_select(0, row_indices) : values;
}

Rows Rows::Slice(int64_t begin, int64_t size) const {
  if (size == this->size()) return *this;
  // The rows of a slice are known only when the compaction has finished.
  TORCH_INTERNAL_ASSERT(pending == nullptr);
  Rows slice;
  slice.hidden = hidden.narrow(0, begin, size);
  slice.all_targets = all_targets;
  if (temperature.defined()) slice.temperature = temperature.narrow(0, begin, size);
  slice.row_indices = row_indices.defined()
                          ? row_indices.narrow(0, begin, size)
                          : at::arange(begin, begin + size, all_targets.options());
  slice.candidates = candidates.RelativeTo(begin, 0);
  slice.num_all = num_all;
  slice.num_out_of_vocab = num_out_of_vocab;
  slice.are_targets_covered = are_targets_covered;
  slice.is_unchecked = is_unchecked;
  return slice;
}

Rows RowsWithoutHidden(const RowSubset& subset, const LinearLogprobInputs& inputs) {
  Rows rows;
  rows.all_targets = FlatTarget(inputs);
  rows.num_all = rows.all_targets.size(0);
  rows.num_out_of_vocab = subset.num_out_of_vocab;
  rows.is_unchecked = subset.is_unchecked;
  rows.pending = subset.pending;
  rows.row_indices = rows.pending != nullptr ? rows.pending->row_indices() : subset.row_indices;
  if (inputs.row_temperature.has_value()) {
    rows.temperature = rows.GatherFromAll(Flat(*inputs.row_temperature));
  }
  return rows;
}

Rows GatherRows(const RowSubset& subset, const at::Tensor& hidden,
                const LinearLogprobInputs& inputs) {
  Rows rows = RowsWithoutHidden(subset, inputs);
  rows.hidden = rows.pending != nullptr ? rows.pending->Gather(hidden) : rows.GatherFromAll(hidden);
  return rows;
}

TargetColumns FindTargets(const Rows& rows, int64_t first, int64_t count) {
  const at::Tensor column = rows.target() - first;
  return {column.clamp(0, count - 1), column.ge(0).logical_and_(column.lt(count))};
}

void CheckTargets(const RowSubset& subset, const at::Tensor& target, const Pass& pass) {
  if (pass.options.out_of_vocab_is_zero || subset.num_out_of_vocab == 0) return;
  TORCH_CHECK_INDEX(false, "target ", target[subset.first_out_of_vocab].item<int64_t>(), " of row ",
                    subset.first_out_of_vocab, " is outside the vocabulary, [0, ",
                    pass.shard.vocab_size, "), as are ", subset.num_out_of_vocab - 1,
                    " other targets; rows to be ignored must hold ignore_index");
}

void CheckTargetOwners(const Rows& rows, const at::Tensor& num_owners, const Pass& pass) {
  if (pass.options.out_of_vocab_is_zero || rows.is_unchecked) return;
  const at::Tensor out_of_vocab = at::nonzero(num_owners == 0).squeeze(1);
  if (out_of_vocab.size(0) == 0) return;
  const auto first = out_of_vocab[0].item<int64_t>();
  const RowSubset subset = {.num_out_of_vocab = out_of_vocab.size(0),
                            .first_out_of_vocab = rows.row_indices.defined()
                                                      ? rows.row_indices[first].item<int64_t>()
                                                      : first};
  CheckTargets(subset, FlatTarget(pass.inputs), pass);
}

}  // namespace logprobd::torch_ops
