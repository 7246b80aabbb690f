#include "kernels/torch_ops/paths/scoring_path.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/common/tile.h"
#include "kernels/torch_ops/paths/cpu_scorer.h"
#include "kernels/torch_ops/paths/fused_path.h"
#include "kernels/torch_ops/types/argument_checks.h"

namespace logprobd::torch_ops {
namespace {

// Upper bounds in bytes of the arrays with a few numbers per row that a forward pass allocates
// after the ranks have agreed: the scores of all blocks, of all rows and between, the copies that
// are saved for the backward pass, and the values from which the scores of one block are computed.
constexpr int64_t kRowBytesMax = 144;
constexpr int64_t kBlockRowBytesMax = 512;
/// Upper bounds of the arrays with a number per entry of a list. A block of rows has arrays of all
/// candidates.
constexpr int64_t kTopKBytesMax = 60;
constexpr int64_t kCandidateBytesMax = 132;
constexpr int64_t kBlockCandidateBytesMax = 8;
/// PyTorch's allocator for GPUs has separate memory for allocations up to this size.
constexpr int64_t kSmallAllocation = int64_t{1} << 20;
/// With more bytes, arrays of all rows are not small.
constexpr int64_t kSmallBytesMax = int64_t{24} << 20;

/// Sets the gradients of the rows that are true in `rows`, bool [all rows], to 0.
void ClearGradients(UpstreamGradients& upstream, const at::Tensor& rows) {
  for (const auto score : kUpstreamScores) {
    MaybeTensor& gradient = upstream.*score;
    if (gradient.has_value()) gradient = gradient->reshape({-1}).masked_fill(rows, 0);
  }
}

/// Warns if the device has fused kernels that do not support the inputs, once for each reason.
void WarnOfSlowPath(const Problem& problem) {
  const LinearLogprobInputs& inputs = problem.inputs;
  const std::string reason = SlowPathReason(problem.device(), inputs.hidden.scalar_type(),
                                            inputs.weight.scalar_type(), problem.hidden_size());
  if (reason.empty()) return;
  WarnOfSlowInputs(
      "linear_logprob uses tensor operations, which are many times slower than its fused kernels, "
      "because " +
      reason);
}

LinearLogprobOutputs ScoresOfNoRows(const Rows& rows, const LinearLogprobOptions& options) {
  LinearLogprobOutputs scores;
  for (const RowOutput& output : kRowOutputs) {
    if (!output.IsRequested(options)) continue;
    std::vector<int64_t> shape = {0};
    if (output.width != nullptr) shape.push_back(options.*output.width);
    scores.*output.member =
        rows.all_targets.new_zeros(shape, output.is_id ? at::kLong : at::kDouble);
  }
  if (rows.candidates.defined()) {
    scores.candidate_logprobs = at::zeros_like(rows.candidates.ids, at::kDouble);
  }
  return scores;
}

Rows BlockOf(const ScoringPath& path, const Rows& rows, int64_t begin, const Problem& problem) {
  return rows.Slice(begin, std::min(path.BlockRows(problem), rows.size() - begin));
}

/// Starts the block of rows from `begin` on. `cache` has all rows that are cached.
std::unique_ptr<PendingScores> StartBlock(const ScoringPath& path, const Rows& block, int64_t begin,
                                          const Problem& problem, const at::Tensor& cache) {
  at::Tensor block_cache;
  if (problem.options.memory.keep_logits != LogitCacheKind::kNone) {
    const int64_t cached = std::min(block.size(), cache.size(0) - begin);
    if (cached > 0) block_cache = SliceRows(cache, begin, cached);
  }
  return path.StartScores(block, problem, block_cache);
}

}  // namespace

BackwardRows BackwardRows::Slice(int64_t begin, int64_t size) const {
  return {rows.Slice(begin, size), cached.Slice(begin, size), upstream, saved};
}

BackwardRows MakeBackwardRows(const RowSubset& subset, const at::Tensor& hidden,
                              const UpstreamGradients& upstream, const SavedOutputs& saved,
                              const Problem& problem) {
  const Rows rows = GatherRows(subset, hidden, problem.inputs);
  BackwardRows result = {rows, FindCachedRows(saved.cache, rows, problem), upstream, saved};
  if (rows.is_unchecked) {
    ClearGradients(result.upstream, rows.target() == problem.options.ignore_index);
  }
  return result;
}

LinearLogprobOutputs ScoringPath::Score(const Rows& rows, const Problem& problem,
                                        const at::Tensor& cache,
                                        std::unique_ptr<PendingScores> first) const {
  if (rows.size() == 0) return ScoresOfNoRows(rows, problem.options);
  std::vector<LinearLogprobOutputs> blocks;
  const int64_t block_rows = BlockRows(problem);
  std::unique_ptr<PendingScores> pending = std::move(first);
  for (int64_t begin = 0; begin < rows.size(); begin += block_rows) {
    // Nothing may be enqueued between StartScores and Join, because their kernels may overlap.
    const Rows block = BlockOf(*this, rows, begin, problem);
    if (pending == nullptr) pending = StartBlock(*this, block, begin, problem, cache);
    blocks.push_back(pending->Join(block, problem));
    pending.reset();  // The next block reuses its memory.
  }
  return ConcatenateScores(blocks);
}

std::unique_ptr<PendingScores> ScoringPath::StartFirstBlock(const Rows& rows,
                                                            const Problem& problem,
                                                            const at::Tensor& cache) const {
  if (rows.size() == 0 || !is_fused()) return nullptr;
  return StartBlock(*this, BlockOf(*this, rows, 0, problem), 0, problem, cache);
}

const ScoringPath* GetFusedPath(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                                int64_t hidden_size) {
  if constexpr (LOGPROBD_TORCH_OPS_CUDA != 0) {
    if (device.is_cuda()) return FusedPath::For(device, hidden, weight, hidden_size);
  }
  return nullptr;
}

std::string SlowPathReason(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                           int64_t hidden_size) {
  if constexpr (LOGPROBD_TORCH_OPS_CUDA != 0) {
    if (device.is_cuda()) return FusedPath::SlowReason(device, hidden, weight, hidden_size);
  }
  return {};
}

const ScoringPath& ChoosePath(const Problem& problem) {
  const LinearLogprobInputs& inputs = problem.inputs;
  const LinearLogprobOptions& options = problem.options;
  const ScoringPath* const fused = GetFusedPath(problem.device(), inputs.hidden.scalar_type(),
                                                inputs.weight.scalar_type(), problem.hidden_size());
  const bool caches_exponentials =
      options.memory.keep_logits == LogitCacheKind::kExponentials ||
      options.memory.keep_logits == LogitCacheKind::kRebasedExponentials;
  TORCH_CHECK_VALUE(
      !caches_exponentials || fused != nullptr,
      "keep_logits is 2, but the fused kernels do not support these inputs: use 0 or 1");
  TORCH_CHECK_VALUE(!caches_exponentials || !options.need_sum_p_squared,
                    "need_sum_p_squared: the fused kernels do not compute the sum of squares while "
                    "they cache exponentials: use keep_logits 0");
  TORCH_CHECK_VALUE(!caches_exponentials || !options.need_target_rank,
                    "need_target_rank: the fused kernels, which cache exponentials, do not compute "
                    "the rank of the target: use keep_logits 0 or 1");
  if (fused == nullptr) WarnOfSlowPath(problem);
  // The fused path has the logits of all shards' targets only after it has read the logits.
  const bool ranks_over_shards = options.need_target_rank && !problem.group.is_alone();
  const bool is_fused =
      fused != nullptr && options.memory.keep_logits != LogitCacheKind::kWide && !ranks_over_shards;
  if (is_fused) return *fused;
  return UsesCpuKernels(problem) ? GetCpuPath() : GetTensorPath();
}

const ScoringPath& PathForShards(const Problem& problem, const std::vector<IdRange>& shards) {
  const auto has_whole_tiles = [&](const IdRange& ids) {
    return ids.begin >= ids.end ||
           (ids.begin % kernels::kTileColumns == 0 &&
            (ids.end % kernels::kTileColumns == 0 || ids.end == problem.shard.vocab_size));
  };
  // The only id of a vocabulary has probability 1, which sums in fp32 miss by up to 1e-7.
  const bool is_supported =
      problem.shard.vocab_size > 1 && std::all_of(shards.begin(), shards.end(), has_whole_tiles);
  return problem.path == &GetCpuPath() && !is_supported ? GetTensorPath() : *problem.path;
}

void ReserveForwardMemory(int64_t num_rows, const Problem& problem) {
  const int64_t block_rows = std::min(num_rows, problem.path->BlockRows(problem));
  const int64_t num_blocks = num_rows / std::max<int64_t>(block_rows, 1) + 1;
  const MaybeTensor& candidates = problem.inputs.candidate_ids;
  const int64_t num_candidates = candidates.has_value() ? candidates->numel() : 0;
  const int64_t bytes =
      (kRowBytesMax + kTopKBytesMax * problem.options.top_k) * problem.num_rows() +
      kBlockRowBytesMax * block_rows +
      (kCandidateBytesMax + kBlockCandidateBytesMax * num_blocks) * num_candidates;
  const auto bytes_options = problem.inputs.hidden.options().dtype(at::kByte);
  std::vector<at::Tensor> small;
  for (int64_t total = 0; total < std::min(bytes, kSmallBytesMax); total += kSmallAllocation) {
    small.push_back(at::empty({kSmallAllocation}, bytes_options));
  }
  const at::Tensor large = at::empty({bytes}, bytes_options);
  problem.path->ReserveMemory(num_rows, problem);
}

LinearLogprobOutputs ConcatenateScores(const std::vector<LinearLogprobOutputs>& blocks) {
  if (blocks.size() == 1) return blocks.front();
  LinearLogprobOutputs scores;
  ForEachField<LinearLogprobOutputs>([&](const auto& field) {
    if (!(blocks.front().*field.member).defined()) return;
    std::vector<at::Tensor> parts;
    parts.reserve(blocks.size());
    for (const LinearLogprobOutputs& block : blocks) parts.push_back(block.*field.member);
    // Each block has the candidates of all rows, with zeros outside its own.
    const bool is_per_row = field.member != &LinearLogprobOutputs::candidate_logprobs;
    scores.*field.member = is_per_row ? at::cat(parts) : at::stack(parts).sum(0);
  });
  return scores;
}

LinearLogprobOutputs ScatterScores(const LinearLogprobOutputs& scores, const Rows& rows,
                                   const Problem& problem) {
  const at::Tensor& target = problem.inputs.target;
  const auto scatter = [&](const at::Tensor& values, at::ScalarType dtype) {
    if (!values.defined()) return at::empty({0}, target.options().dtype(dtype));
    const at::Tensor all = rows.ScatterToAll(values.to(dtype));
    if (rows.is_unchecked) {
      const at::Tensor is_ignored = rows.target() == problem.options.ignore_index;
      all.masked_fill_(all.dim() == 1 ? is_ignored : is_ignored.unsqueeze(1), 0);
    }
    std::vector<int64_t> shape = target.sizes().vec();
    shape.insert(shape.end(), all.sizes().begin() + 1, all.sizes().end());
    return all.view(shape);
  };
  LinearLogprobOutputs all;
  for (const RowOutput& output : kRowOutputs) {
    all.*output.member = scatter(scores.*output.member, output.is_id ? at::kLong : problem.wide);
  }
  all.candidate_logprobs = at::empty({0}, all.logprob.options());
  if (scores.candidate_logprobs.defined()) {
    at::Tensor logprobs = scores.candidate_logprobs.to(problem.wide);
    if (rows.is_unchecked) {
      const at::Tensor is_ignored = rows.target() == problem.options.ignore_index;
      logprobs = logprobs.masked_fill(is_ignored.index_select(0, rows.candidates.rows), 0);
    }
    all.candidate_logprobs = logprobs.view(problem.inputs.candidate_ids->sizes());
  }
  all.cache = scores.cache;
  return all;
}

}  // namespace logprobd::torch_ops
