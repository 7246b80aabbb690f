#pragma once

// A cache holds the logits between a forward and its backward pass, row-major as [rows, pitch]. It
// has the first valid rows, one after another. If there are fewer, the rows behind them are not
// written.
//
//   kWide           A row holds one logit before temperature per column of this rank's weight, in
//                   the wide dtype. Columns of padding are not written.
//   kExponentials,  A row holds bytes, whose layout is CachedRowLayout.
//   kRebasedExponentials

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>

#include "kernels/common/tile.h"
#include "kernels/torch_ops/paths/problem.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {

/// Layout of one row in a cache of exponentials, in bytes: whole tiles of exponentials and their
/// exponents (kernels::CachedExponentials), then the row's largest logit, which is not written for
/// kRebasedExponentials, and the logit of its target. T is int64_t or c10::SymInt.
template <typename T>
struct CachedRowLayout {
  explicit CachedRowLayout(const T& weight_rows)
      : num_tiles((weight_rows + kernels::kTileColumns - 1) / int64_t{kernels::kTileColumns}) {}

  static constexpr int64_t kTileBytes = 2 * kernels::kTileColumns;
  static constexpr int64_t kKeyBytes = 8;
  static constexpr int64_t kLogitBytes = 4;

  /// Returns the offset of the exponents.
  T exponents() const { return num_tiles * kTileBytes; }
  /// Returns the offset of the largest logit, a LogitKey, aligned to its size.
  T max_key() const {
    const T exponents_end = num_tiles * (kTileBytes + static_cast<int64_t>(sizeof(int32_t)));
    return (exponents_end + kKeyBytes - 1) / kKeyBytes * kKeyBytes;
  }
  /// Returns the offset of the target's logit.
  T target_logit() const { return max_key() + kKeyBytes; }
  /// Returns the distance between rows, in tiles of exponentials.
  T row_tiles() const { return (target_logit() + kLogitBytes + kTileBytes - 1) / kTileBytes; }
  /// Returns the distance between rows, in bytes.
  T row_bytes() const { return row_tiles() * kTileBytes; }

  T num_tiles;
};

/// Returns whether a cache of exponentials may be kRebasedExponentials, provided that the gradient
/// of a row is its exponentials times one factor, except at the target.
bool CanRebaseExponentials(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options);

/// Returns `options` with kRebasedExponentials in place of kExponentials if every gradient that can
/// follow the forward pass permits it. Forward and backward pass call it with the same arguments.
LinearLogprobOptions WithRebasedCache(const LinearLogprobInputs& inputs,
                                      LinearLogprobOptions options);

/// Returns the number of bytes per row of a cache for a weight of `weight_rows` rows. Throws
/// c10::ValueError for an invalid `kind`.
int64_t CachedRowBytes(LogitCacheKind kind, at::ScalarType wide, int64_t weight_rows);

/// Largest size in bytes of the block of gradients that a fused backward pass forms at a time,
/// besides the memory that it needs later anyway. It keeps the extra memory of the operator below
/// 256 MiB. Larger blocks need fewer additions to the gradient of hidden.
inline constexpr int64_t kGradientBytesMax = int64_t{208} << 20;

/// Returns how many rows can be cached if the cache, and the block of gradients that a fused
/// backward pass forms at a time, may take `budget_bytes` together. Throws like CachedRowBytes.
int64_t CachedRowsWithin(int64_t budget_bytes, LogitCacheKind kind, at::ScalarType wide,
                         int64_t weight_rows);

/// Returns the largest size in bytes of the block of gradients next to a cache of `cache_bytes`
/// that does not have all rows.
int64_t GradientBytesBeside(int64_t cache_bytes);

/// Returns whether the options may leave rows out of the cache.
bool IsPartlyCached(const Problem& problem);

/// Returns an uninitialised cache for rows of target, whose sizes may be symbolic. The cache is
/// [rows, pitch], or has no elements if nothing is cached. The result depends only on dtypes, sizes
/// and options, as tracing requires.
at::Tensor EmptyLogitCache(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options);

/// Returns an uninitialised cache for `num_rows` rows.
at::Tensor EmptyLogitCache(int64_t num_rows, const Problem& problem);

/// Copies the first rows of a block of logits, [n, columns], to a cache in the wide dtype, which
/// has at most n rows.
void CacheLogits(const at::Tensor& cache_rows, Columns columns, const at::Tensor& logits);

/// The part of a pass's rows that is cached: its first rows.
struct CachedRows {
  /// The whole cache if `row_indices` is defined, otherwise these rows of it. Undefined if nothing
  /// is cached.
  at::Tensor cache;
  at::Tensor row_indices;  ///< [cached rows], int64, indices into `cache`; undefined: 0, 1, 2, ...

  /// Returns the number of cached rows.
  int64_t size() const {
    if (!cache.defined()) return 0;
    return row_indices.defined() ? row_indices.size(0) : cache.size(0);
  }
  /// Returns the cached ones of the pass's rows [begin, begin + size).
  CachedRows Slice(int64_t begin, int64_t size) const;
  /// Returns whether the cache holds logits rather than exponentials.
  bool has_logits() const { return cache.defined() && cache.scalar_type() != at::kByte; }
  /// Returns the logits of some columns, [cached rows, columns], like BlockLogits. The result may
  /// be a view of the cache.
  at::Tensor Logits(Columns columns) const;
};

/// Finds `rows` in the cache of a forward pass, which holds its first valid rows. Throws
/// c10::ValueError if `cache` has the wrong dtype or shape.
CachedRows FindCachedRows(const MaybeTensor& cache, const Rows& rows, const Problem& problem);

}  // namespace logprobd::torch_ops
