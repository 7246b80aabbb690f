#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/logits.h"
#include "kernels/torch_ops/rows.h"

namespace logprobd::torch_ops {

/// What options.keep_logits makes Forward keep: [rows, pitch] of `dtype`, row-major.
///
/// KeptLogits::kWide: logits before temperature in the wide type, column by column of this rank's
/// weight. Row k is that of the k-th row that counts; rows behind these, and columns of padding,
/// are not written.
/// KeptLogits::kExponentials, kRebasedExponentials: bytes, a row as kept_row.h has it, otherwise
/// likewise.
struct LogitCacheFormat {
  at::ScalarType dtype = at::kFloat;
  c10::SymInt rows;   ///< All rows of target: how many count is not known without looking.
  c10::SymInt pitch;  ///< Elements from one row to the next.
};

/// Only dtypes, sizes and options decide, so that tracing knows it. Throws c10::ValueError for a
/// keep_logits that is none of KeptLogits.
LogitCacheFormat FormatOfLogitCache(const LinearLogprobInputs& inputs,
                                    const LinearLogprobOptions& options);

/// A cache that is not written yet, for symbolic sizes too; without elements where none is kept.
at::Tensor RoomForLogits(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options);

/// The same for so many rows.
at::Tensor RoomForLogitsOf(int64_t num_rows, const LinearLogprobInputs& inputs,
                           const LinearLogprobOptions& options);

/// Writes a block of logits [n, columns], as BlockLogits gives them, to n rows of a cache.
void KeepLogits(const at::Tensor& cache_rows, Columns columns, const at::Tensor& logits);

/// Where some rows' logits lie in a cache.
struct CachedRows {
  at::Tensor cache;  ///< Its rows from the first of these on; undefined: none was kept.
  at::Tensor index;  ///< [n], int64, places in it; undefined: one after another.

  /// `size` of them from `begin` on.
  CachedRows Part(int64_t begin, int64_t size) const;
  /// Whether the cache holds logits, not what the fused kernels keep of them.
  bool has_logits() const { return cache.defined() && cache.scalar_type() != at::kByte; }
  /// [n, columns], as BlockLogits gives them; maybe a view of the cache.
  at::Tensor Logits(Columns columns) const;
};

/// Finds `rows`, of those that counted in Forward, in what it kept. Throws c10::ValueError for a
/// cache of another format.
CachedRows FindCachedRows(const std::optional<at::Tensor>& cache, const Rows& rows,
                          const LinearLogprobInputs& inputs, const LinearLogprobOptions& options);

}  // namespace logprobd::torch_ops
