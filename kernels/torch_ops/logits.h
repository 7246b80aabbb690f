#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/rows.h"

namespace logprobd::torch_ops {

/// Columns of this rank's weight, half-open, that are computed together. Inner borders lie on tiles
/// of the whole vocabulary.
struct Columns {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

/// Most logits that are held at a time; some five arrays of as many live beside each other.
inline constexpr int64_t kBlockLogits = int64_t{4} << 20;
/// Most rows of a block.
inline constexpr int64_t kBlockRows = 32'768;

/// The block from `begin` on of columns [0, columns) of a shard whose first is `vocab_start`: with
/// so many rows it holds at most kBlockLogits, or a tile.
Columns BlockOfColumns(int64_t begin, int64_t columns, int64_t vocab_start, int64_t block_rows);

/// All such blocks, from 0 on.
std::vector<Columns> CutColumns(int64_t columns, int64_t vocab_start, int64_t block_rows);

/// Logits [rows, columns] of a block, before temperature, in `wide`.
at::Tensor BlockLogits(const at::Tensor& hidden, const LinearLogprobInputs& inputs,
                       const LinearLogprobOptions& options, Columns columns, at::ScalarType wide);

/// `factor` / temperature of each row, [n, 1] in `wide`, rounded once.
at::Tensor PerTemperature(double factor, const Rows& rows, const LinearLogprobOptions& options,
                          at::ScalarType wide);

inline constexpr double kLog2E = 1.44269504088896340736;

}  // namespace logprobd::torch_ops
