#include "kernels/torch_ops/ops/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <algorithm>
#include <bit>
#include <type_traits>
#include <utility>

#include "kernels/torch_ops/paths/scoring_path.h"

namespace logprobd::torch_ops {
namespace {

/// Returns the numbers that must be equal on every rank of a group, so that all ranks run the same
/// number of collectives with the same sizes.
std::vector<RankGroup::CommonNumber> CommonNumbers(const Problem& problem,
                                                   const RowSubset& subset) {
  if (problem.group.is_alone()) return {};
  const LinearLogprobInputs& inputs = problem.inputs;
  std::vector<RankGroup::CommonNumber> common = {
      {"number of targets", problem.num_rows()},
      {"values of target", subset.target_checksum},
      {"size of hidden", inputs.hidden.numel()},
      {"dtype of hidden", static_cast<int64_t>(inputs.hidden.scalar_type())},
      {"float64 or not", static_cast<int64_t>(problem.wide)},
      {"support by the fused kernels", problem.path->is_fused()},
      {"temperature per row or not", inputs.row_temperature.has_value()},
      {"number of candidate_ids", inputs.candidate_ids ? inputs.candidate_ids->numel() : -1}};
  ForEachField<LinearLogprobOptions>([&](const auto& field) {
    if (field.across_ranks != AcrossRanks::kMustAgree) return;
    using T = ValueOf<decltype(field)>;
    const T& value = field.In(problem.options);
    if constexpr (std::is_floating_point_v<T>) {
      common.push_back({field.name, std::bit_cast<int64_t>(value)});
    } else if constexpr (std::is_convertible_v<T, int64_t>) {
      common.push_back({field.name, value});
    } else {
      TORCH_INTERNAL_ASSERT(false, field.name, " cannot be compared over the ranks");
    }
  });
  return common;
}

}  // namespace

Rows PrepareRows(const RowSubset& subset, const Problem& problem) {
  Rows rows;
  if (!problem.options.parallel.sequence_parallel) {
    rows = GatherRows(subset, problem.inputs.hidden, problem.inputs);
  } else {
    const at::Tensor& all = problem.gathered_hidden;
    rows = RowsWithoutHidden(subset, problem.inputs);
    rows.hidden = rows.row_indices.defined()
                      ? at::empty({rows.row_indices.size(0), all.size(1)}, all.options())
                      : all;
  }
  // A rank that is alone lists them later, while the first kernel runs.
  if (!problem.group.is_alone()) rows.candidates = CandidatesAmong(rows, problem);
  return rows;
}

Agreement AgreeOnRows(Problem& problem, const std::function<Preparation()>& prepare,
                      const std::function<void(const Rows&)>& while_waiting) {
  const at::Tensor& weight = problem.inputs.weight;
  const VocabularyParallel& parallel = problem.options.parallel;
  Preparation mine;
  auto pending = problem.group.StartExchange(problem.device(), [&] {
    mine = prepare();
    RankGroup::RankInfo info = {CommonNumbers(problem, mine.subset), {}};
    info.common.insert(info.common.end(), mine.common.begin(), mine.common.end());
    const IdRange ids = ShardIds(weight, parallel);
    info.own = {ids.begin, ids.end, mine.block_rows_max};
    info.has_shard = true;
    return info;
  });
  if (while_waiting && !pending.has_error() && !parallel.sequence_parallel) {
    while_waiting(mine.rows);
  }
  int64_t end = 0;
  int64_t block_rows_max = mine.block_rows_max;
  std::vector<IdRange> shards;
  for (const auto& [shard_begin, shard_end, shard_rows] : pending.Result()) {
    const int64_t valid_end =
        parallel.vocab_valid > 0 ? std::min(shard_end, parallel.vocab_valid) : shard_end;
    shards.push_back({shard_begin, valid_end});
    end = std::max(end, shard_end);
    block_rows_max = std::min(block_rows_max, shard_rows);
  }
  CheckNoOverlap(shards);
  problem.shard = Shard(weight, parallel, end);
  problem.path = &PathForShards(problem, shards);
  Rows rows = std::move(mine.rows);
  if (parallel.sequence_parallel) {
    const at::Tensor hidden = problem.HiddenOfAllRows();
    if (rows.row_indices.defined()) at::index_select_out(rows.hidden, hidden, 0, rows.row_indices);
  }
  if (problem.group.is_alone()) rows.candidates = CandidatesAmong(rows, problem);
  rows.are_targets_covered = !problem.group.is_alone() && !mine.subset.is_unchecked &&
                             AreCovered(mine.subset.targets, shards);
  return {rows, block_rows_max};
}

}  // namespace logprobd::torch_ops
