#pragma once

// Gives the scorer of kernels/cpu the operands and the threads of PyTorch.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/cpu/row_scorer.h"
#include "kernels/torch_ops/paths/problem.h"
#include "kernels/torch_ops/rows/shard.h"

namespace logprobd::torch_ops {

/// Returns whether logits and scales are those of kernels/cpu, as in the service's engine on a CPU.
/// This is so for tensors on a CPU unless hidden or weight is fp64.
bool UsesCpuKernels(const Problem& problem);

/// The threads of PyTorch's parallel loops.
class TorchThreads final : public kernels::LoopThreads {
 public:
  TorchThreads();

  int32_t num_threads() const override { return num_threads_; }
  void ForEach(int64_t num_units,
               const std::function<void(int64_t unit, int32_t worker)>& body) override;

 private:
  const int32_t num_threads_;
};

/// A RowScorer of some columns of this rank's weight, which UsesCpuKernels.
class CpuScorer {
 public:
  /// The scorer counts ids from `first_id`, a multiple of the tile, for columns.begin. The ids end
  /// with `vocab_size`. A batch has up to `num_rows` rows.
  CpuScorer(const Problem& problem, Columns columns, int64_t first_id, int64_t vocab_size,
            int64_t num_rows);

  kernels::RowScorer& operator*() { return scorer_; }
  kernels::RowScorer* operator->() { return &scorer_; }

 private:
  const at::Tensor bias_;  // fp32, padded to whole tiles, or undefined
  TorchThreads threads_;
  kernels::RowScorer scorer_;
};

/// Returns parameters that score `hidden` [n, H], which is contiguous. The caller adds arrays.
kernels::ScoreRowsParams RowsParams(const at::Tensor& hidden);

/// Returns the logits of some columns for `hidden` [n, H] before temperature, fp32 [n, columns].
/// They have the bits of the logits from which CpuPath computes scores.
at::Tensor CpuLogits(const at::Tensor& hidden, const Problem& problem, Columns columns);

}  // namespace logprobd::torch_ops
