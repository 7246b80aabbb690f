#include "kernels/torch_ops/rows/listed_pairs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <vector>

#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/rows/pass.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {
namespace {

/// Returns the sum of (i + 1) * values[i], modulo 2^64.
at::Tensor Checksum(const at::Tensor& values) {
  return (values * at::arange(1, values.numel() + 1, values.options())).sum();
}

}  // namespace

ListedPairs ListedPairs::RelativeTo(int64_t row, int64_t id) const {
  if (!defined()) return {};
  return {row == 0 ? rows : rows - row, id == 0 ? ids : ids - id};
}

ListedPairs CandidatesOf(const LinearLogprobInputs& inputs) {
  if (!inputs.candidate_ids.has_value()) return {};
  const at::Tensor ids = Flat(*inputs.candidate_ids).to(at::kLong);
  const at::Tensor numbers = at::arange(ids.numel(), ids.options());
  const int64_t num_rows = inputs.target.numel();
  if (ids.numel() == 0) return {numbers, ids};
  if (!inputs.candidate_offsets.has_value()) {
    return {numbers.div(ids.numel() / num_rows, /*rounding_mode=*/"floor"), ids};
  }
  // A row is found by a search rather than by repeating its index, which needs no wait and stays in
  // bounds even if the offsets could not be checked.
  const at::Tensor offsets = inputs.candidate_offsets->to(at::kLong).contiguous();
  const at::Tensor rows =
      at::searchsorted(offsets, numbers, /*out_int32=*/false, /*right=*/true).sub_(1);
  return {rows.clamp_(0, num_rows - 1), ids};
}

ListedPairs CandidatesAmong(const Rows& rows, const Pass& pass) {
  ListedPairs pairs = CandidatesOf(pass.inputs);
  if (!pairs.defined() || !rows.row_indices.defined()) return pairs;
  const at::Tensor is_valid = rows.all_targets != pass.options.ignore_index;
  pairs.rows = at::where(is_valid, is_valid.cumsum(0) - 1, -1).index_select(0, pairs.rows);
  return pairs;
}

PairsInBlock FindPairs(const ListedPairs& pairs, int64_t num_rows, int64_t num_columns) {
  const auto is_below = [](const at::Tensor& values, int64_t end) {
    return values.ge(0).logical_and_(values.lt(end));
  };
  return {pairs.rows.clamp(0, num_rows - 1), pairs.ids.clamp(0, num_columns - 1),
          is_below(pairs.rows, num_rows).logical_and_(is_below(pairs.ids, num_columns))};
}

CandidateNumbers ReadCandidates(const Pass& pass) {
  const MaybeTensor& given = pass.inputs.candidate_ids;
  if (!given.has_value() || pass.device_ops->IsCapturing(pass.device())) return {};
  const at::Tensor ids = Flat(*given).to(at::kLong);
  std::vector<at::Tensor> numbers;
  if (pass.inputs.candidate_offsets.has_value()) {
    const at::Tensor offsets = pass.inputs.candidate_offsets->to(at::kLong);
    const at::Tensor decreases = offsets.diff() < 0;
    numbers = {offsets[0], offsets[-1], decreases.any().to(at::kLong), Checksum(offsets)};
  } else {
    const at::Tensor zero = ids.new_zeros({});
    numbers = {zero, zero + ids.numel(), zero, zero};
  }
  if (ids.numel() > 0) numbers.insert(numbers.end(), {ids.min(), ids.max(), Checksum(ids)});
  const at::Tensor read = at::stack(numbers).cpu();
  const auto* const values = read.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(values[0] == 0 && values[1] == ids.numel() && values[2] == 0,
                    "candidate_offsets begins with ", values[0], ", ends with ", values[1],
                    values[2] == 0 ? "" : " and decreases in between",
                    ": it must not decrease from 0 to the number of candidate_ids, ", ids.numel());
  if (ids.numel() == 0) return {};
  return {.min_id = values[4],
          .max_id = values[5],
          .ids_checksum = values[6],
          .offsets_checksum = values[3]};
}

void CheckCandidateIds(const CandidateNumbers& numbers, const Pass& pass) {
  const MaybeTensor& given = pass.inputs.candidate_ids;
  if (!given.has_value() || given->numel() == 0) return;
  const bool is_alone = pass.is_alone;
  const IdRange ids = is_alone ? pass.shard.ids() : IdRange{0, pass.shard.vocab_size};
  for (const int64_t id : {numbers.min_id, numbers.max_id}) {
    TORCH_CHECK_INDEX(id >= ids.begin && id < ids.end, "candidate_ids contains ", id,
                      ", which is outside the vocabulary, [", ids.begin, ", ", ids.end, ")");
  }
}

}  // namespace logprobd::torch_ops
