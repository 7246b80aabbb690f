#include "kernels/torch_ops/rows/listed_pairs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <c10/core/Event.h>
#include <c10/util/Exception.h>

#include <memory>
#include <vector>

#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/rows/pass.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {
namespace {

/// Numbers that the device writes while the host goes on.
class PendingNumbers {
 public:
  /// Starts to copy int64 numbers to the host.
  explicit PendingNumbers(const at::Tensor& numbers) : on_host_(numbers) {
    if (numbers.is_cpu()) return;
    on_host_ = at::empty(numbers.sizes(), at::TensorOptions(at::kLong).pinned_memory(true));
    on_host_.copy_(numbers, /*non_blocking=*/true);
    is_ready_ = std::make_shared<c10::Event>(RecordEvent(numbers.device()));
  }

  /// Waits for the numbers.
  const int64_t* Result() const {
    if (is_ready_ != nullptr) is_ready_->synchronize();
    return on_host_.const_data_ptr<int64_t>();
  }

 private:
  at::Tensor on_host_;
  std::shared_ptr<c10::Event> is_ready_;  // null: they are there
};

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

std::function<CandidateNumbers()> StartReadingCandidates(const Pass& pass) {
  const auto nothing = [] { return CandidateNumbers(); };
  const MaybeTensor& given = pass.inputs.candidate_ids;
  if (!given.has_value() || pass.device_ops->IsCapturing(pass.device())) return nothing;
  const at::Tensor ids = Flat(*given).to(at::kLong);
  const int64_t num_ids = ids.numel();
  const bool has_offsets = pass.inputs.candidate_offsets.has_value();
  const bool has_checksums = !pass.is_alone;
  std::vector<at::Tensor> numbers;  // in the order in which they are read below
  if (has_offsets) {
    const at::Tensor offsets = pass.inputs.candidate_offsets->to(at::kLong);
    numbers = {offsets[0], offsets[-1], (offsets.diff() < 0).any().to(at::kLong)};
    if (has_checksums) numbers.push_back(Checksum(offsets));
  }
  if (num_ids > 0) {
    const auto [min_id, max_id] = at::aminmax(ids);
    numbers.insert(numbers.end(), {min_id, max_id});
    if (has_checksums) numbers.push_back(Checksum(ids));
  }
  if (numbers.empty()) return nothing;
  const PendingNumbers read(at::stack(numbers));
  return [=] {
    CandidateNumbers result;
    const int64_t* next = read.Result();
    if (has_offsets) {
      const auto begin = *next++;
      const auto end = *next++;
      const bool decreases = *next++ != 0;
      TORCH_CHECK_VALUE(begin == 0 && end == num_ids && !decreases,
                        "candidate_offsets begins with ", begin, ", ends with ", end,
                        decreases ? " and decreases in between" : "",
                        ": it must not decrease from 0 to the number of candidate_ids, ", num_ids);
      if (has_checksums) result.offsets_checksum = *next++;
    }
    if (num_ids > 0) {
      result.min_id = *next++;
      result.max_id = *next++;
      if (has_checksums) result.ids_checksum = *next++;
    }
    return result;
  };
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
