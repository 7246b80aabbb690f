#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/torch_ops/api/linear_logprob.h"
#include "kernels/torch_ops/api/problem.h"
#include "kernels/torch_ops/paths/logit_cache.h"
#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {

/// Scores of one block of rows, as far as this rank computes them alone.
class PendingScores {
 public:
  virtual ~PendingScores() = default;

  /// Combines the ranks' parts and returns the scores. When a row compaction is pending, waits for
  /// it and returns the scores of the rows that it found. Ranks of a group call it together.
  /// `are_targets_covered`: see Rows, whose value may have become known after the start. Throws
  /// c10::IndexError for an out-of-vocabulary target.
  virtual LinearLogprobOutputs Join(const Problem& problem, bool are_targets_covered) = 0;
};

/// The rows that a backward pass differentiates, and values of all rows.
struct BackwardRows {
  Rows rows;
  CachedRows cached;
  UpstreamGradients upstream;  ///< Of all rows.
  SavedOutputs saved;          ///< Of all rows.

  BackwardRows Slice(int64_t begin, int64_t size) const;
};

/// The rows of `subset`, whose `hidden` has all rows, [num_all, H]. Other rows get zero gradients.
BackwardRows MakeBackwardRows(const RowSubset& subset, const at::Tensor& hidden,
                              const UpstreamGradients& upstream, const SavedOutputs& saved,
                              const Problem& problem);

/// Gradient of the loss with respect to the dot products hidden . weight of a block of rows, formed
/// one block of columns at a time.
class DotGradients {
 public:
  virtual ~DotGradients() = default;

  /// The block of columns, beginning at `begin`, that Form must be called for next. Blocks follow
  /// one another from column 0 to the last; each is formed once.
  virtual Columns Next(int64_t begin) const = 0;

  /// The gradient [n, columns], in the dtype in which it is multiplied by the weight and the hidden
  /// states: theirs if they are multiplied in 16 bits, else the wide dtype. When a row compaction
  /// is pending, only the rows that it found. Valid until the next call. Also adds to the bias's
  /// gradient.
  virtual at::Tensor Form(Columns columns) = 0;

  /// Factors that the rows of the gradient still have to be multiplied by, fp32 [n, 1]; undefined:
  /// none.
  virtual at::Tensor RowFactors() const { return {}; }
};

/// What DotGradients are made from. The references must outlive them.
struct DotGradientsArguments {
  const BackwardRows& rows;
  const Problem& problem;
  at::Tensor bias_sum;  ///< [V] in the wide dtype: the bias's gradient is added; undefined: none.
};

/// A way to compute scores and gradients. Implementations are stateless and thread-safe.
class ScoringPath {
 public:
  virtual ~ScoringPath() = default;

  /// Whether it is the path of the fused kernels.
  virtual bool is_fused() const = 0;

  /// Number of rows in a block: the same on every rank, since each block takes collectives.
  virtual int64_t BlockRows(const Problem& problem) const = 0;

  /// Whether a forward pass may start before the host knows the number of valid rows.
  virtual bool ScoresDuringCompaction(const Problem& problem) const = 0;

  /// Whether a backward pass may start before the host knows its number of rows.
  virtual bool DifferentiatesDuringCompaction(const UpstreamGradients& upstream,
                                              const Problem& problem) const = 0;

  /// Allocates and frees what StartScores will allocate for `num_rows` rows: PyTorch's allocator
  /// then has the memory, and a shortage shows before ranks wait for each other.
  virtual void ReserveMemory(int64_t num_rows, const Problem& problem) const = 0;

  /// Starts the scores of a block of rows. What options.keep_logits requests is written to
  /// `cache`, the block's rows of a cache, or undefined. Ranks of a group call it together unless
  /// the path is fused: then it only enqueues kernels, also while ranks exchange information. The
  /// vocabulary's size need not be known yet.
  virtual std::unique_ptr<PendingScores> StartScores(const Rows& block, const Problem& problem,
                                                     const at::Tensor& cache) const = 0;

  virtual std::unique_ptr<DotGradients> MakeDotGradients(
      const DotGradientsArguments& arguments) const = 0;

  /// Scores of all `rows`, [n] each: argmax int64, the others in fp64 or, by the fused kernels,
  /// fp32; undefined if not requested. `first` is what StartFirstBlock returned, or null. Ranks of
  /// a group call it together, with as many rows.
  LinearLogprobOutputs Score(const Rows& rows, const Problem& problem, const at::Tensor& cache,
                             std::unique_ptr<PendingScores> first = nullptr) const;

  /// Starts the scores of the first block of `rows` if that only enqueues kernels; else null.
  std::unique_ptr<PendingScores> StartFirstBlock(const Rows& rows, const Problem& problem,
                                                 const at::Tensor& cache) const;
};

/// The path for any device, dtype and option, by tensor operations.
const ScoringPath& GetTensorPath();

/// The path that scores these inputs. Throws c10::ValueError when options.keep_logits requests
/// exponentials, which only the fused path has, and that path does not support the inputs.
const ScoringPath& ChoosePath(const LinearLogprobInputs& inputs,
                              const LinearLogprobOptions& options);

/// Makes sure of the memory that this rank's share of a forward pass takes while others wait.
void ReserveForwardMemory(const RowSubset& subset, const Problem& problem);

/// Concatenates the scores of one or more blocks of rows.
LinearLogprobOutputs ConcatenateScores(const std::vector<LinearLogprobOutputs>& blocks);

/// Scores of `rows` as scores of all rows, each shaped like target and in the operator's dtypes.
/// Other rows have zeros; undefined scores become tensors without elements.
LinearLogprobOutputs ScatterScores(const LinearLogprobOutputs& scores, const Rows& rows,
                                   const Problem& problem);

}  // namespace logprobd::torch_ops
