#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/paths/problem.h"
#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/rows/valid_rows.h"
#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

/// The part of the scores of one block of rows that this rank computes alone.
class PendingScores {
 public:
  virtual ~PendingScores() = default;

  /// Combines the ranks' parts and returns the scores. When a row compaction is pending, waits for
  /// it and returns the scores of the rows that it found. Ranks of a group call it together.
  /// `block` has the rows of StartScores; its candidates and are_targets_covered may be set only
  /// after the start of a fused path. Throws c10::IndexError for an out-of-vocabulary target.
  virtual LinearLogprobOutputs Join(const Rows& block, const Problem& problem) = 0;
};

/// The rows that a backward pass differentiates, and values of all rows.
struct BackwardRows {
  Rows rows;
  CachedRows cached;
  UpstreamGradients upstream;  ///< Upstream gradients of all rows.
  SavedOutputs saved;          ///< Saved outputs of all rows.

  BackwardRows Slice(int64_t begin, int64_t size) const;
};

/// Returns the rows of `subset`. `hidden` has all rows, [num_all, H]. If the subset may contain
/// ignored rows (RowSubset::is_unchecked), their upstream gradients are set to 0.
BackwardRows MakeBackwardRows(const RowSubset& subset, const at::Tensor& hidden,
                              const UpstreamGradients& upstream, const SavedOutputs& saved,
                              const Problem& problem);

/// Gradient of the loss with respect to the dot products hidden . weight of a block of rows,
/// computed one block of columns at a time.
class DotGradients {
 public:
  virtual ~DotGradients() = default;

  /// Returns the block of columns, beginning at `begin`, for which Form must be called next. The
  /// blocks follow one another from column 0 to the last column, and each is computed once.
  virtual Columns Next(int64_t begin) const = 0;

  /// Returns the gradient [n, columns], in the dtype in which it is multiplied by the weight and
  /// the hidden states: the weight's dtype if they are multiplied in 16 bits, otherwise the wide
  /// dtype.
  /// When a row compaction is pending, the result has only the rows that it found. The result is
  /// valid until the next call. Also adds to the bias's gradient.
  virtual at::Tensor Form(Columns columns) = 0;

  /// Returns the factors, fp32 [n, 1], by which the rows of the gradient still have to be
  /// multiplied, or an undefined tensor if there are none.
  virtual at::Tensor RowFactors() const { return {}; }

  /// Returns tensors [n, H] whose sum is the hidden states, times RowFactors if there are any, in
  /// the dtype in which they are multiplied by the gradient. The smallest values come first.
  virtual std::vector<at::Tensor> HiddenTerms() const = 0;
};

/// The arguments of MakeDotGradients. Either all or none of the rows have cached exponentials. The
/// references must outlive the DotGradients.
struct DotGradientsArguments {
  const BackwardRows& rows;
  const Problem& problem;
  /// [V] in the wide dtype, to which the bias's gradient is added. Undefined if it is not needed.
  at::Tensor bias_sum;
  /// Bytes per column of a block of columns that the caller allocates besides the gradient. Beside
  /// a cache that does not have all rows, the memory for both is limited (GradientBytesBeside).
  int64_t column_bytes_beside = 0;
};

/// A way to compute scores and gradients. Implementations are stateless and thread-safe.
class ScoringPath {
 public:
  virtual ~ScoringPath() = default;

  /// Returns whether this is the path of the fused kernels.
  virtual bool is_fused() const { return false; }

  /// Returns the number of rows in a block. It is the same on every rank, because each block runs
  /// collectives.
  virtual int64_t BlockRows(const Problem& problem) const = 0;

  /// Returns whether a forward pass may start before the host knows the number of valid rows.
  virtual bool ScoresDuringCompaction(const Problem& /*problem*/) const { return false; }

  /// Returns whether a backward pass may start before the host knows its number of rows.
  virtual bool DifferentiatesDuringCompaction(const UpstreamGradients& /*upstream*/,
                                              const Problem& /*problem*/) const {
    return false;
  }

  /// Replaces inputs by copies where this path cannot read them in place. hidden is [n, H].
  virtual void AlignInputs(LinearLogprobInputs& /*inputs*/) const {}

  /// Allocates and frees the memory that the scores of `num_rows` rows take, except for arrays with
  /// a few numbers per row (ReserveForwardMemory) and where the path shares errors before the
  /// collectives that follow its allocations, as all but the fused path do.
  virtual void ReserveMemory(int64_t /*num_rows*/, const Problem& /*problem*/) const {}

  /// Starts to compute the scores of a block of rows. The values that options.memory.keep_logits
  /// requests are written to `cache`, which is the part of a cache for the block's first rows, or
  /// undefined if none of its rows is cached. Ranks of a group call it together unless the path is
  /// fused. A fused path only enqueues kernels, which is also allowed while ranks exchange
  /// information. The vocabulary's size need not be known yet.
  virtual std::unique_ptr<PendingScores> StartScores(const Rows& block, const Problem& problem,
                                                     const at::Tensor& cache) const = 0;

  virtual std::unique_ptr<DotGradients> MakeDotGradients(
      const DotGradientsArguments& arguments) const = 0;

  /// Returns the scores of all `rows`, [n] each, and of all candidates, [N], which are 0 for those
  /// of other rows. argmax is int64; the others are fp64, or fp32 from the fused kernels. Scores
  /// that are not requested are undefined. `first` is the result of
  /// StartFirstBlock, or null. Ranks of a group call it together, with the same number of rows.
  LinearLogprobOutputs Score(const Rows& rows, const Problem& problem, const at::Tensor& cache,
                             std::unique_ptr<PendingScores> first = nullptr) const;

  /// Starts to compute the scores of the first block of `rows` if this only enqueues kernels;
  /// otherwise returns null.
  std::unique_ptr<PendingScores> StartFirstBlock(const Rows& rows, const Problem& problem,
                                                 const at::Tensor& cache) const;
};

/// Returns the path that uses tensor operations and supports every device, dtype and option.
const ScoringPath& GetTensorPath();

/// Returns the path that scores with kernels/cpu. It requires UsesCpuKernels, and shards of whole
/// tiles (PathForShards).
const ScoringPath& GetCpuPath();

/// Returns the path of the fused kernels, or null if they do not support the device, dtypes or
/// hidden size.
const ScoringPath* GetFusedPath(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                                int64_t hidden_size);

/// Returns why the device's fused kernels do not support these inputs, and a remedy. Returns an
/// empty string if they do, or if the device has none.
std::string SlowPathReason(at::Device device, at::ScalarType hidden, at::ScalarType weight,
                           int64_t hidden_size);

/// Returns problem.path, or the tensor path if that path does not support the vocabulary: shards
/// that begin or end inside a tile, or one id alone. `shards` are the valid ids of all ranks, so
/// that all ranks choose the same path; problem.shard is known.
const ScoringPath& PathForShards(const Problem& problem, const std::vector<IdRange>& shards);

/// Returns the path that scores the problem's inputs. Warns once per process and reason if
/// that is the tensor path although the device has fused kernels. Throws c10::ValueError if
/// options.memory.keep_logits requests exponentials, which only the fused path can cache, and that
/// path does not support the inputs.
const ScoringPath& ChoosePath(const Problem& problem);

/// Reserves the memory that this rank needs to score `num_rows` rows while other ranks wait for it:
/// allocates and frees it, so that PyTorch's allocator holds it and an out-of-memory error occurs
/// where ranks still share errors.
void ReserveForwardMemory(int64_t num_rows, const Problem& problem);

/// Concatenates the scores of one or more blocks of rows.
LinearLogprobOutputs ConcatenateScores(const std::vector<LinearLogprobOutputs>& blocks);

/// Returns the scores of `rows` as scores of all rows, each shaped like target and in the
/// operator's dtypes. Other rows hold zeros. Undefined scores become tensors without elements.
LinearLogprobOutputs ScatterScores(const LinearLogprobOutputs& scores, const Rows& rows,
                                   const Problem& problem);

}  // namespace logprobd::torch_ops
