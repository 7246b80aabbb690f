// Computes one loss of all rows and its gradients. For each block of rows it computes the scores
// and a cache of logits, then the gradients from the cache.

#include "kernels/torch_ops/ops/loss.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/torch_ops/ops/agreement.h"
#include "kernels/torch_ops/paths/gradient_sums.h"
#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/paths/problem.h"
#include "kernels/torch_ops/paths/scoring_path.h"
#include "kernels/torch_ops/ranks/rank_group.h"
#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/rows/valid_rows.h"
#include "kernels/torch_ops/types/argument_checks.h"

namespace logprobd::torch_ops {
namespace {

// Coefficients.

/// Returns the tensors that decide which rows have a gradient: those of scores whose factor is not
/// 0. Returns no tensors if any such score has the same coefficient for every row.
UpstreamGradients DecidingCoefficients(const LossCoefficients& coefficients) {
  UpstreamGradients deciding;
  for (const LossScore& score : kLossScores) {
    const auto& [values, factor] = coefficients.*score.coefficient;
    if (factor == 0) continue;
    if (!values.has_value()) return {};
    deciding.*score.upstream = values;
  }
  return deciding;
}

bool HasAny(const UpstreamGradients& gradients) {
  return std::any_of(kUpstreamScores.begin(), kUpstreamScores.end(),
                     [&](const auto score) { return (gradients.*score).has_value(); });
}

/// Returns the coefficients of `rows`, [n] each, as a backward pass takes them. Ignored rows, which
/// are among `rows` while a CUDA graph is captured, have the coefficient 0.
UpstreamGradients CoefficientsOfRows(const LossCoefficients& coefficients, const Rows& rows,
                                     const Problem& problem) {
  const auto wide = problem.inputs.hidden.options().dtype(problem.wide);
  const at::Tensor is_valid =
      rows.is_unchecked ? rows.target() != problem.options.ignore_index : at::Tensor();
  const double num_rows =
      coefficients.is_mean ? static_cast<double>(std::max<int64_t>(rows.size(), 1)) : 1.0;
  at::Tensor unchecked_share;  // 1 / number of valid rows, which the host does not know
  if (coefficients.is_mean && rows.is_unchecked) {
    unchecked_share = is_valid.sum().clamp_min(1).to(wide.dtype()).reciprocal();
  }
  UpstreamGradients result;
  for (const LossScore& score : kLossScores) {
    const auto& [given, given_factor] = coefficients.*score.coefficient;
    if (given_factor == 0) continue;
    const double factor = unchecked_share.defined() ? given_factor : given_factor / num_rows;
    at::Tensor values;
    if (given.has_value()) {
      values = rows.GatherFromAll(Flat(*given));
      // The values are widened because a mean would otherwise be rounded to 16 bits.
      if (values.element_size() == 2) values = values.to(wide.dtype());
      if (factor != 1) values = values * factor;
    } else {
      values = at::full({}, factor, wide).expand({rows.size()});
    }
    if (unchecked_share.defined()) values = values * unchecked_share;
    // Ignored rows get 0, whatever their coefficients are.
    if (is_valid.defined()) values = at::where(is_valid, values, 0);
    result.*score.upstream = values;
  }
  return result;
}

UpstreamGradients SliceCoefficients(const UpstreamGradients& gradients, int64_t begin,
                                    int64_t size) {
  UpstreamGradients slice;
  for (const auto score : kUpstreamScores) {
    const MaybeTensor& values = gradients.*score;
    if (values.has_value()) slice.*score = SliceRows(*values, begin, size);
  }
  return slice;
}

// Options and block sizes.

/// Returns whether the gradient of a row is its exponentials times one factor, except at the
/// target.
bool AreGradientsExponentials(const LossCoefficients& coefficients, GradientNeeds needs,
                              const LinearLogprobInputs& inputs,
                              const LinearLogprobOptions& options) {
  const bool is_logprob_alone = coefficients.logprob.factor != 0 &&
                                coefficients.entropy.factor == 0 && coefficients.lse.factor == 0 &&
                                coefficients.mean_logit.factor == 0;
  // The bias's gradient is summed over rows before they are multiplied by their factors.
  return is_logprob_alone && !needs.bias && CanRebaseExponentials(inputs, options);
}

/// Returns the options of the pass, which may compute more scores than it returns.
LinearLogprobOptions PassOptions(const LossCoefficients& coefficients, GradientNeeds needs,
                                 const LinearLogprobInputs& inputs, LinearLogprobOptions options) {
  options.need_entropy |= coefficients.entropy.factor != 0;
  options.need_mean_logit |= coefficients.mean_logit.factor != 0;
  options.need_gradients = needs.any();
  if (!needs.any()) options.memory.keep_logits = LogitCacheKind::kNone;
  options.memory.cached_rows = -1;  // Blocks have as many rows as can be cached.
  if (options.memory.keep_logits == LogitCacheKind::kExponentials &&
      AreGradientsExponentials(coefficients, needs, inputs, options)) {
    options.memory.keep_logits = LogitCacheKind::kRebasedExponentials;
  }
  return options;
}

/// Returns how many of `num_rows` rows have logits that fit this rank's cache at a time.
int64_t RowsThatFit(int64_t num_rows, const Problem& problem, int64_t cache_bytes) {
  const int64_t row_bytes = CachedRowBytes(problem.options.memory.keep_logits, problem.wide,
                                           problem.inputs.weight.size(0));
  return row_bytes == 0 ? num_rows : std::min(num_rows, cache_bytes / row_bytes);
}

/// Returns the size of equal blocks of at most `block_rows_max` rows, or of one row if that is less
/// than 1.
int64_t BlockSize(int64_t num_rows, int64_t block_rows_max) {
  block_rows_max = std::max<int64_t>(block_rows_max, 1);
  const int64_t num_blocks = std::max<int64_t>((num_rows + block_rows_max - 1) / block_rows_max, 1);
  return (num_rows + num_blocks - 1) / num_blocks;
}

/// Adds the gradients of the rows of a block that need one; sums.hidden has all rows of the block.
/// `when_hidden_is_complete` is called as in AddGradients, but not if some rows need no gradient.
void AddGradientsOfBlock(const BackwardRows& rows, const Problem& problem, GradientSums& sums,
                         const std::function<bool()>& when_hidden_is_complete) {
  const at::Tensor hidden = sums.hidden;
  if (!hidden.defined() || !rows.rows.row_indices.defined()) {
    return AddGradients(rows, problem, sums, /*listed=*/{}, when_hidden_is_complete);
  }
  sums.hidden = at::empty({rows.rows.size(), hidden.size(1)}, hidden.options());
  AddGradients(rows, problem, sums);
  at::Tensor(hidden).zero_().index_copy_(0, rows.rows.row_indices, sums.hidden);
}

/// What a rank prepares for a loss, in addition to its rows, before the ranks agree.
struct LossMemory {
  RowSubset with_gradient;           ///< The rows that have a coefficient other than 0.
  at::Tensor cache;                  ///< Unwritten.
  std::optional<GradientSums> sums;  ///< In a group, if all rows are one block.
  RankGroup::Buffers error_buffers;
};

/// Runs the pass, one block of rows at a time.
class LossPass {
 public:
  /// `memory.cache` has space for the rows of one block.
  LossPass(const Problem& problem, GradientNeeds needs, const Agreement& agreed, LossMemory memory)
      : problem_(problem),
        needs_(needs),
        rows_(agreed.rows),
        block_rows_(BlockSize(rows_.size(), agreed.block_rows_max)),
        with_gradient_(std::move(memory.with_gradient)),
        cache_(std::move(memory.cache)),
        sums_(std::move(memory.sums)),
        error_buffers_(std::move(memory.error_buffers)) {}

  /// Computes the scores of all rows and adds up the gradients. `first` has the scores of the first
  /// block, or is null. Gradients throws the errors that occur between the collectives.
  LinearLogprobOutputs Run(const LossCoefficients& coefficients,
                           std::unique_ptr<PendingScores> first) {
    std::vector<LinearLogprobOutputs> blocks;
    int64_t begin = 0;
    do {
      Rows given = rows_;
      // If a rank failed later, the others would wait forever in the collectives of the scores. The
      // memory of a single block was reserved before the ranks agreed.
      if (block_rows_ < rows_.size()) {
        problem_.group.RunOnAllRanks(problem_.device(), [&] {
          error_.Rethrow(false);
          given = rows_.Slice(begin, std::min(block_rows_, rows_.size() - begin));
          if (begin == 0) {
            sums_.reset();
            sums_ = AllocateSums(problem_, needs_, /*weight_grad=*/std::nullopt, rows_.size(),
                                 /*is_added_at_once=*/false);
          }
          if (!problem_.group.is_alone()) ReserveForwardMemory(given.size(), problem_);
        });
      }
      const at::Tensor cache = SliceRows(cache_, 0, given.size());
      blocks.push_back(problem_.path->Score(given, problem_, cache, std::move(first)));
      // If a compaction is pending, the first block contains all of its rows.
      const Rows block = given.Resolved();
      if (begin == 0) rows_ = rows_.Resolved();
      error_.Run([&] {
        // These operations are enqueued after the block's kernels, which run in the meantime.
        if (begin == 0) row_coefficients_ = CoefficientsOfRows(coefficients, rows_, problem_);
        Differentiate(block, blocks.back(),
                      SliceCoefficients(row_coefficients_, begin, block.size()), begin);
      });
      begin += block.size();
    } while (begin < rows_.size());
    cache_.reset();
    if (problem_.group.is_alone()) error_.Rethrow(false);
    return ConcatenateScores(blocks);
  }

  /// Returns the gradients of `inputs`, which are those of the call. Throws as
  /// RankGroup::ShareError does.
  InputGradients Gradients(const LinearLogprobInputs& inputs) {
    // A rank that has failed takes part in the sum as well.
    const bool is_summed = problem_.sums_hidden_gradient();
    if (needs_.hidden && is_summed && !hidden_sum_.has_value()) StartSum();
    InputGradients gradients;
    error_.Run([&] {
      if (needs_.hidden && !hidden_sum_.has_value()) StartSum();
      gradients = ToInputGradients(hidden_sum_, sums_.value_or(GradientSums()), inputs);
    });
    problem_.group.ShareError(error_buffers_, error_);
    return gradients;
  }

  /// Returns the valid rows. Must be called after Run.
  const Rows& rows() const { return rows_; }
  /// Returns the coefficients of these rows, [n] each. Must be called after Run.
  const UpstreamGradients& row_coefficients() const { return row_coefficients_; }

 private:
  void Differentiate(const Rows& block, const LinearLogprobOutputs& scores,
                     const UpstreamGradients& coefficients, int64_t begin) {
    if (!needs_.any()) return;
    const Problem block_problem = problem_.ForRows(block);
    const at::ScalarType wide = problem_.wide;
    SavedOutputs saved = {scores.lse.to(wide), scores.lse_rest.to(wide), scores.entropy, {}};
    if (saved.entropy.defined()) saved.entropy = saved.entropy.to(wide);
    if (problem_.options.memory.keep_logits != LogitCacheKind::kNone) {
      saved.cache = SliceRows(cache_, 0, block.size());
      saved.is_cache_overwritable = true;
    }
    RowSubset subset = {.is_unchecked = block.is_unchecked};
    if (!with_gradient_.Resolved().has_every_valid_row) {
      subset = CompactRows(problem_, block.target(), coefficients, /*ids=*/{});
    }
    const BackwardRows backward =
        MakeBackwardRows(subset, block.hidden, coefficients, saved, block_problem);
    if (!sums_.has_value()) {
      sums_ = AllocateSums(problem_, needs_, /*weight_grad=*/std::nullopt, rows_.size(),
                           AreAddedAtOnce(backward.rows.size()));
    }
    GradientSums block_sums = *sums_;
    if (needs_.hidden) block_sums.hidden = SliceRows(sums_->hidden, begin, block.size());
    const bool is_last = begin + block.size() == rows_.size();
    AddGradientsOfBlock(backward, block_problem, block_sums, [&] {
      // Scattering rows while the logits are cached would take more memory.
      const bool is_scattered = rows_.row_indices.defined();
      if (!is_last || !problem_.sums_hidden_gradient() || is_scattered) return false;
      StartSum();
      return true;
    });
    sums_->weight_into = block_sums.weight_into;
  }

  void StartSum() { hidden_sum_ = StartHiddenSum(sums_->hidden, rows_.row_indices, problem_); }

  const Problem& problem_;
  const GradientNeeds needs_;
  Rows rows_;
  const int64_t block_rows_;
  const RowSubset with_gradient_;
  at::Tensor cache_;
  std::optional<GradientSums> sums_;
  const RankGroup::Buffers error_buffers_;
  DeferredError error_;
  UpstreamGradients row_coefficients_;
  std::optional<RankGroup::PendingSum> hidden_sum_;
};

/// Returns whether rows may be scored while they are compacted. They must fit one block.
bool ScoresDuringCompaction(const Problem& problem, int64_t cache_bytes) {
  const int64_t num_rows = problem.num_rows();
  return problem.path->ScoresDuringCompaction(problem) &&
         RowsThatFit(num_rows, problem, cache_bytes) == num_rows;
}

}  // namespace

LinearLogprobLoss ForwardWithGradients(const LinearLogprobInputs& inputs,
                                       const LinearLogprobOptions& options,
                                       const LossCoefficients& coefficients, GradientNeeds needs,
                                       int64_t cache_bytes) {
  needs.bias = needs.bias && inputs.bias.has_value();
  // Autocast must not change the dtypes that are chosen here.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Problem problem(inputs, PassOptions(coefficients, needs, inputs, options));
  const RankGroup& group = problem.group;
  LossMemory memory;
  RowSubset& with_gradient = memory.with_gradient;
  at::Tensor& cache = memory.cache;
  const auto prepare = [&] {
    CheckArguments(inputs, options, group.size());
    TORCH_CHECK_VALUE(!inputs.candidate_ids.has_value(),
                      "candidate_ids: linear_logprob_loss has no scores of candidates");
    problem.Plan();
    CheckCoefficients(coefficients, inputs);
    Preparation mine;
    const UpstreamGradients deciding = DecidingCoefficients(coefficients);
    int64_t num_rows = 0;
    const auto allocate_cache = [&] {
      mine.block_rows_max = 0;
      const Wait wait = ScoresDuringCompaction(problem, cache_bytes) ? Wait::kLater : Wait::kNow;
      with_gradient = CompactValidRows(problem, deciding, wait);
      // Usually all valid rows have a gradient. If that is known, one compaction is enough.
      const bool is_known = with_gradient.pending == nullptr || !HasAny(deciding);
      mine.subset = is_known && with_gradient.has_every_valid_row
                        ? with_gradient
                        : CompactValidRows(problem, /*upstream=*/{}, wait);
      num_rows = mine.subset.size(problem.num_rows());
      mine.block_rows_max = RowsThatFit(num_rows, problem, cache_bytes);
      cache = EmptyLogitCache(BlockSize(num_rows, mine.block_rows_max), problem);
    };
    // Smaller blocks take longer, but they are better than no loss.
    for (bool is_short = true; is_short;) {
      try {
        allocate_cache();
        is_short = false;
      } catch (const c10::OutOfMemoryError&) {
        if (mine.block_rows_max <= 1) throw;
        cache_bytes /= 2;
      }
    }
    TORCH_CHECK_VALUE(
        group.is_alone() || mine.block_rows_max >= num_rows || !IsCapturing(inputs.hidden),
        "memory_budget: in a CUDA graph with a group of several ranks, the logits of all ",
        num_rows, " rows must fit at once, but those of ", mine.block_rows_max, " rows do");
    mine.common = {{"need of hidden's gradient", needs.hidden},
                   {"reduction to the mean or sum", coefficients.is_mean}};
    for (const LossScore& score : kLossScores) {
      const double factor = (coefficients.*score.coefficient).factor;
      mine.common.push_back({"coefficient of a score", std::bit_cast<int64_t>(factor)});
    }
    mine.rows = PrepareRows(mine.subset, problem);
    if (!group.is_alone()) {
      memory.error_buffers = group.AllocateErrorBuffers(problem.device());
      if (cache.size(0) == num_rows && needs.any()) {
        memory.sums = AllocateSums(problem, needs, /*weight_grad=*/std::nullopt, num_rows,
                                   AreAddedAtOnce(with_gradient.size(problem.num_rows())));
      }
      ReserveForwardMemory(cache.size(0), problem);
      if (needs.hidden && problem.sums_hidden_gradient()) ReserveHiddenSum(problem);
    }
    return mine;
  };
  std::unique_ptr<PendingScores> first;
  const Agreement agreed = AgreeOnRows(problem, prepare, [&](const Rows& rows) {
    first = problem.path->StartFirstBlock(rows.Slice(0, cache.size(0)), problem, cache);
  });
  // Another rank may have memory only for smaller blocks; these scores are then discarded.
  if (BlockSize(agreed.rows.size(), agreed.block_rows_max) != cache.size(0)) first.reset();
  LossPass pass(problem, needs, agreed, std::move(memory));
  LinearLogprobOutputs scores = pass.Run(coefficients, std::move(first));
  LinearLogprobLoss result;
  result.loss = problem.device_ops->SumLoss(scores, pass.row_coefficients()).to(problem.wide);
  if (!options.need_entropy) scores.entropy.reset();
  if (!options.need_mean_logit) scores.mean_logit.reset();
  result.scores = ScatterScores(scores, pass.rows(), problem);
  result.gradients = pass.Gradients(inputs);
  return result;
}

void ScaleGradient(at::Tensor& gradient, const at::Tensor& factor) {
  TORCH_CHECK_VALUE(factor.numel() == 1, "factor has the shape ", factor.sizes(),
                    ": it must have one element");
  DeviceOps::For(gradient.device().type()).Scale(gradient, factor);
}

}  // namespace logprobd::torch_ops
