// Computes scores on a CPU with kernels/cpu, from which the service computes its scores: both give
// the same bits. The weight is packed while it is used. Gradients are those of the tensor path,
// whose logits come from kernels/cpu as well (BlockLogits).

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>

#include "kernels/common/reduction.h"
#include "kernels/common/row_sums.h"
#include "kernels/common/tile.h"
#include "kernels/torch_ops/paths/cpu_scorer.h"
#include "kernels/torch_ops/paths/logits.h"
#include "kernels/torch_ops/paths/scoring_path.h"

namespace logprobd::torch_ops {
namespace {

using kernels::kTileColumns;
using kernels::ReductionType;

/// Combines arrays of the shards over the ranks.
void Reduce(std::span<const kernels::Reduction> arrays, const RankGroup& group) {
  for (const auto& [values, count, type] : arrays) {
    const bool is_long = kernels::ReductionBytes(type) == 8;
    at::Tensor integers = at::from_blob(values, {count}, is_long ? at::kLong : at::kInt);
    switch (type) {
      case ReductionType::kSumInt32:
      case ReductionType::kSumInt64:
        group.Sum(integers);
        break;
      case ReductionType::kMaxInt32:
        group.Max(integers);
        break;
      case ReductionType::kMaxUint32:
      case ReductionType::kMaxUint64: {
        // Flipping the sign bit turns the order of unsigned integers into that of signed ones.
        const int64_t sign = is_long ? std::numeric_limits<int64_t>::min()
                                     : int64_t{std::numeric_limits<int32_t>::min()};
        integers.bitwise_xor_(sign);
        group.Max(integers);
        integers.bitwise_xor_(sign);
        break;
      }
    }
  }
}

/// Sums of weighted logits. Each tile's sum is computed in one go and the tiles are added in their
/// order, so the bits do not depend on threads.
class MeanLogits {
 public:
  MeanLogits(int64_t rows_max, const Problem& problem)
      : first_tile_(problem.shard.begin / kTileColumns),
        weights_(MeanLogitWeights(problem, {0, problem.shard.columns}).contiguous()),
        sums_(at::empty({kernels::NumTiles(problem.shard.columns), rows_max}, weights_.options())) {
  }

  void Add(const kernels::TileLogits& tile) const {
    constexpr int64_t kLanes = 8;  // independent sums, which the compiler keeps in vectors
    const int64_t index = tile.first_column / kTileColumns - first_tile_;
    const double* weights = weights_.const_data_ptr<double>() + index * kTileColumns;
    double* out = sums_.mutable_data_ptr<double>() + index * sums_.size(1) + tile.row_begin;
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      const float* logits = tile.logits + row * kTileColumns;
      std::array<double, kLanes> lanes = {};
      int64_t column = 0;
      for (; column + kLanes <= tile.num_columns; column += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          lanes[static_cast<size_t>(lane)] +=
              weights[column + lane] * static_cast<double>(logits[column + lane]);
        }
      }
      for (; column < tile.num_columns; ++column) {
        lanes[0] += weights[column] * static_cast<double>(logits[column]);
      }
      double sum = 0;
      for (const double lane : lanes) sum += lane;
      out[row] = sum;
    }
  }

  /// Returns the sums of the first `num_rows` rows, fp64.
  at::Tensor Sums(int64_t num_rows) const {
    at::Tensor sums = at::zeros({num_rows}, sums_.options());
    for (int64_t tile = 0; tile < sums_.size(0); ++tile) sums += sums_[tile].narrow(0, 0, num_rows);
    return sums;
  }

 private:
  const int64_t first_tile_;
  const at::Tensor weights_;  // fp64 [columns]
  const at::Tensor sums_;     // fp64 [tiles, rows]
};

/// Returns a pointer to row `begin` of contiguous values, or null if they are undefined.
template <typename T>
T* PointerTo(const at::Tensor& values, int64_t begin) {
  return values.defined() ? values.mutable_data_ptr<T>() + begin * values.stride(0) : nullptr;
}

/// The candidates of a block's rows, ascending by row, [N] each.
struct BlockCandidates {
  at::Tensor positions;  ///< int64, among the candidates of all rows; undefined if there are none.
  at::Tensor rows;       ///< int32
  at::Tensor ids;        ///< int32, of the whole vocabulary.
  at::Tensor logprobs;   ///< fp32; logits of this shard, or 0, until the scores are written.
};

BlockCandidates CandidatesOfBlock(const Rows& rows) {
  const ListedPairs& pairs = rows.candidates;
  if (!pairs.defined()) return {};
  const at::Tensor is_inside = pairs.rows.ge(0).logical_and_(pairs.rows.lt(rows.size()));
  const at::Tensor positions = at::nonzero(is_inside).squeeze(1);
  const auto select = [&](const at::Tensor& values) {
    return values.index_select(0, positions).to(at::kInt);
  };
  return {positions, select(pairs.rows), select(pairs.ids),
          at::zeros({positions.size(0)}, pairs.ids.options().dtype(at::kFloat))};
}

class CpuScores : public PendingScores {
 public:
  CpuScores(Rows rows, const Problem& problem, at::Tensor cache)
      : rows_(std::move(rows)),
        cache_(std::move(cache)),
        scorer_(problem, {0, problem.shard.columns}, problem.shard.begin, problem.shard.vocab_size,
                rows_.size()) {
    const LinearLogprobOptions& options = problem.options;
    const auto fp32 = rows_.all_targets.options().dtype(at::kFloat);
    const at::Tensor target = rows_.target();
    // Ids of other shards are given as they are; those outside the vocabulary may exceed 32 bits.
    const at::Tensor is_id = target.ge(0).logical_and_(target.lt(problem.shard.vocab_size));
    targets_ = at::where(is_id, target, -1).to(at::kInt);
    is_mine_ = FindTargets(rows_, problem.shard.begin, problem.shard.columns).is_in_range;
    temperatures_ = rows_.temperature.defined()
                        ? rows_.temperature.to(at::kFloat).contiguous()
                        : at::full({rows_.size()}, options.temperature, fp32);
    const auto floats = [&] { return at::empty({rows_.size()}, fp32); };
    scores_.logprob = floats();
    scores_.lse = floats();
    scores_.lse_rest = floats();
    const auto integers = [&] { return at::empty({rows_.size()}, fp32.dtype(at::kInt)); };
    if (options.need_argmax) scores_.argmax = integers();
    if (options.need_max_logit) scores_.max_logit = floats();
    if (options.need_min_logit) scores_.min_logit = floats();
    if (options.need_sum_p_squared) scores_.sum_p_squared = floats();
    if (options.need_target_rank) scores_.target_rank = integers();
    if (options.top_k > 0) {
      scores_.top_k_ids = at::empty({rows_.size(), options.top_k}, fp32.dtype(at::kInt));
      scores_.top_k_logprobs = at::empty({rows_.size(), options.top_k}, fp32);
    }
    candidates_ = CandidatesOfBlock(rows_);
    if (options.top_k > 0 && !problem.group.is_alone()) {
      const int64_t count = problem.group.size() * scorer_->step_rows() * options.top_k;
      gathered_keys_ = at::empty({count}, fp32.dtype(at::kLong));
    }
    if (options.need_mean_logit) {
      scores_.mean_logit = at::empty({rows_.size()}, fp32.dtype(at::kDouble));
      means_ = std::make_unique<MeanLogits>(scorer_->step_rows(), problem);
    }
    nonfinite_ = at::empty({rows_.size()}, fp32.dtype(at::kByte));
    entropy_ = floats();
  }

  LinearLogprobOutputs Join(const Rows& block, const Problem& problem) override {
    const LinearLogprobOptions& options = problem.options;
    const RankGroup& group = problem.group;
    at::Tensor num_owners = is_mine_.to(at::kLong);
    // Workspaces of ranks with different numbers of threads or tiles hold different numbers of
    // rows.
    at::Tensor step_rows = at::full({1}, scorer_->step_rows(), num_owners.options());
    if (!group.is_alone()) {
      if (!block.are_targets_covered) {
        group.Sum(num_owners);
        CheckTargetOwners(rows_, num_owners, problem);
      } else {
        num_owners.fill_(1);
      }
      group.Min(step_rows);
    }
    const auto step = step_rows.item<int64_t>();
    for (int64_t begin = 0; begin < rows_.size(); begin += step) {
      ScoreStep(begin, std::min(step, rows_.size() - begin), problem);
    }
    scores_.logprob = at::where(num_owners > 0, scores_.logprob, 0);
    if (options.need_gradients) RefinePeakedRows(problem);
    if (options.need_entropy) scores_.entropy = entropy_;
    if (options.need_argmax) scores_.argmax = scores_.argmax.to(at::kLong);
    if (options.need_target_rank) {
      scores_.target_rank = at::where(num_owners > 0, scores_.target_rank.to(at::kLong), -1);
    }
    if (candidates_.positions.defined()) JoinCandidates(problem);
    if (options.need_mean_logit) {
      scores_.mean_logit.mul_(PerTemperature(1, rows_, problem, at::kDouble).squeeze(1));
      group.Sum(scores_.mean_logit);
    }
    return scores_;
  }

 private:
  void ScoreStep(int64_t begin, int64_t num_rows, const Problem& problem) {
    const RankGroup& group = problem.group;
    const bool has_rank = problem.options.need_target_rank;
    std::span<const kernels::Reduction> arrays;
    at::Tensor hidden;
    BlockCandidates candidates;
    kernels::ScoreRowsParams params;
    group.RunOnAllRanks(problem.device(), [&] {
      hidden = rows_.hidden.narrow(0, begin, num_rows).contiguous();
      candidates = CandidatesOfStep(begin, num_rows);
      params = Params(hidden, begin, candidates, problem);
      if (group.is_alone()) {
        scorer_->Score(params);
      } else if (has_rank) {
        arrays = scorer_->ScoreTargets(params, 0, num_rows);
      } else {
        arrays = scorer_->ScoreTiles(params, 0, num_rows);
      }
    });
    if (!group.is_alone()) {
      Reduce(arrays, group);
      if (has_rank) Reduce(scorer_->ScoreTiles(params, 0, num_rows), group);
      Reduce(scorer_->SumTiles(), group);
      if (params.top_k > 0) GatherTopKeys(group);
      if (params.num_candidates > 0) {
        // The shards that do not have a candidate add the bits of 0.
        at::Tensor bits = candidates.logprobs.view(at::kInt);
        group.Sum(bits);
      }
      scorer_->WriteScores();
    }
    if (means_ != nullptr) {
      scores_.mean_logit.narrow(0, begin, num_rows).copy_(means_->Sums(num_rows));
    }
  }

  /// Returns the candidates of rows [begin, begin + num_rows), which are then counted from `begin`.
  BlockCandidates CandidatesOfStep(int64_t begin, int64_t num_rows) const {
    if (!candidates_.positions.defined()) return {};
    const std::span rows(candidates_.rows.const_data_ptr<int32_t>(),
                         static_cast<size_t>(candidates_.rows.size(0)));
    const auto first = std::lower_bound(rows.begin(), rows.end(), begin) - rows.begin();
    const auto end = std::lower_bound(rows.begin(), rows.end(), begin + num_rows) - rows.begin();
    const auto narrow = [&](const at::Tensor& values) {
      return values.narrow(0, first, end - first);
    };
    return {narrow(candidates_.positions), narrow(candidates_.rows) - begin,
            narrow(candidates_.ids), narrow(candidates_.logprobs)};
  }

  /// Sets the log-probabilities of all candidates, with zeros for rows of other blocks. A candidate
  /// that no shard has gets NaN.
  void JoinCandidates(const Problem& problem) {
    at::Tensor num_owners;
    problem.group.RunOnAllRanks(problem.device(), [&] {
      const at::Tensor column = candidates_.ids - problem.shard.begin;
      num_owners = column.ge(0).logical_and_(column.lt(problem.shard.columns)).to(at::kLong);
    });
    problem.group.Sum(num_owners);
    problem.group.RunOnAllRanks(problem.device(), [&] {
      const at::Tensor logprobs =
          at::where(num_owners > 0, candidates_.logprobs, std::numeric_limits<float>::quiet_NaN());
      scores_.candidate_logprobs = at::zeros({rows_.candidates.ids.size(0)}, logprobs.options())
                                       .index_copy_(0, candidates_.positions, logprobs);
    });
  }

  /// Collects the shards' lists of the largest logits. Allocates only a few bytes.
  void GatherTopKeys(const RankGroup& group) {
    const std::span<const uint64_t> keys = scorer_->TopKeys();
    const auto count = static_cast<int64_t>(keys.size());
    const at::Tensor mine = at::from_blob(const_cast<uint64_t*>(keys.data()), {count},
                                          targets_.options().dtype(at::kLong));
    at::Tensor all = gathered_keys_.narrow(0, 0, group.size() * count);
    group.GatherInto(all, mine);
    std::copy_n(reinterpret_cast<const uint64_t*>(all.const_data_ptr<int64_t>()), all.numel(),
                scorer_->gathered_top_keys());
  }

  /// Corrects lse_rest of rows of which one id has almost all probability, p. The gradient of its
  /// logit is p - 1, for which sums of exponentials in fp32 are not accurate enough. All ranks have
  /// the same rows.
  void RefinePeakedRows(const Problem& problem) {
    // Rows with 1 - p up to 8e-5 have less entropy, whatever the vocabulary. With larger ones an
    // error of 1e-7 does not matter.
    constexpr double kPeakedEntropy = 2e-3;
    const at::Tensor peaked = at::nonzero(entropy_ < kPeakedEntropy).squeeze(1);
    if (peaked.size(0) == 0) return;
    Rows rows = rows_;
    rows.candidates = {};
    problem.group.RunOnAllRanks(problem.device(), [&] {
      rows.row_indices =
          rows_.row_indices.defined() ? rows_.row_indices.index_select(0, peaked) : peaked;
      rows.hidden = rows_.hidden.index_select(0, peaked);
      if (rows.temperature.defined()) rows.temperature = rows.temperature.index_select(0, peaked);
    });
    Problem of_lse = problem;
    for (const RowOutput& output : kRowOutputs) {
      if (output.need != nullptr) of_lse.options.*output.need = false;
    }
    of_lse.options.top_k = 0;
    of_lse.options.memory.keep_logits = LogitCacheKind::kNone;
    of_lse.options.out_of_vocab_is_zero = true;
    const at::Tensor lse = GetTensorPath().Score(rows, of_lse, /*cache=*/{}).lse;
    scores_.lse_rest.index_copy_(0, peaked,
                                 (lse - scores_.lse.index_select(0, peaked)).to(at::kFloat));
  }

  kernels::ScoreRowsParams Params(const at::Tensor& hidden, int64_t begin,
                                  const BlockCandidates& candidates, const Problem& problem) const {
    kernels::ScoreRowsParams params = RowsParams(hidden);
    params.targets = PointerTo<int32_t>(targets_, begin);
    params.temperatures = PointerTo<float>(temperatures_, begin);
    params.logprob = PointerTo<float>(scores_.logprob, begin);
    params.entropy = PointerTo<float>(entropy_, begin);
    params.lse = PointerTo<float>(scores_.lse, begin);
    params.lse_rest = PointerTo<float>(scores_.lse_rest, begin);
    params.argmax_id = PointerTo<int32_t>(scores_.argmax, begin);
    params.max_logit = PointerTo<float>(scores_.max_logit, begin);
    params.min_logit = PointerTo<float>(scores_.min_logit, begin);
    params.sum_p_squared = PointerTo<float>(scores_.sum_p_squared, begin);
    params.target_rank = PointerTo<int32_t>(scores_.target_rank, begin);
    params.top_k = static_cast<int32_t>(problem.options.top_k);
    params.top_k_ids = PointerTo<int32_t>(scores_.top_k_ids, begin);
    params.top_k_logprobs = PointerTo<float>(scores_.top_k_logprobs, begin);
    if (candidates.positions.defined()) {
      params.num_candidates = candidates.rows.size(0);
      params.candidate_rows = candidates.rows.const_data_ptr<int32_t>();
      params.candidate_ids = candidates.ids.const_data_ptr<int32_t>();
      params.candidate_logprobs = candidates.logprobs.mutable_data_ptr<float>();
    }
    params.nonfinite = PointerTo<uint8_t>(nonfinite_, begin);
    // The cache has the block's first rows, perhaps not all of them.
    const int64_t num_cached =
        cache_.defined() ? std::clamp<int64_t>(cache_.size(0) - begin, 0, hidden.size(0)) : 0;
    if (num_cached == 0 && means_ == nullptr) return params;
    const at::Tensor cached = num_cached > 0 ? cache_.narrow(0, begin, num_cached) : at::Tensor();
    params.visit_logits = [this, cached, num_cached,
                           first = problem.shard.begin](const kernels::TileLogits& tile) {
      if (means_ != nullptr) means_->Add(tile);
      const int64_t end = std::min(tile.row_begin + tile.num_rows, num_cached);
      for (int64_t row = tile.row_begin; row < end; ++row) {
        std::copy_n(tile.logits + (row - tile.row_begin) * kTileColumns, tile.num_columns,
                    PointerTo<float>(cached, row) + tile.first_column - first);
      }
    };
    return params;
  }

  const Rows rows_;
  const at::Tensor cache_;
  CpuScorer scorer_;
  at::Tensor targets_;       // int32 [n]; -1 outside the vocabulary
  at::Tensor is_mine_;       // bool [n]: whether this shard has the target
  at::Tensor temperatures_;  // fp32 [n]
  at::Tensor nonfinite_;     // uint8 [n]
  BlockCandidates candidates_;
  at::Tensor gathered_keys_;  // int64 [ranks * rows of a step * top_k], undefined unless needed
  at::Tensor entropy_;        // fp32 [n]
  std::unique_ptr<MeanLogits> means_;
  LinearLogprobOutputs scores_;
};

class CpuPath : public ScoringPath {
 public:
  // Only scores are stored for every row of a block.
  int64_t BlockRows(const Problem& /*problem*/) const override {
    return std::numeric_limits<int64_t>::max();
  }

  std::unique_ptr<PendingScores> StartScores(const Rows& block, const Problem& problem,
                                             const at::Tensor& cache) const override {
    std::unique_ptr<CpuScores> scores;
    problem.group.RunOnAllRanks(
        problem.device(), [&] { scores = std::make_unique<CpuScores>(block, problem, cache); });
    return scores;
  }

  std::unique_ptr<DotGradients> MakeDotGradients(
      const DotGradientsArguments& arguments) const override {
    return GetTensorPath().MakeDotGradients(arguments);
  }
};

}  // namespace

const ScoringPath& GetCpuPath() {
  static const CpuPath path;
  return path;
}

}  // namespace logprobd::torch_ops
