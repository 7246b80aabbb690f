// Implements the passes: the rows that are not masked are selected, their dot products with both
// weights computed for a block of rows at a time, and reduced to statistics and gradients.

#include "kernels/torch_ops/ops/divergence.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "kernels/torch_ops/paths/divergence_rows.h"
#include "kernels/torch_ops/paths/row_divergence.h"
#include "kernels/torch_ops/paths/student_gradients.h"
#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/rows/shard.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {
namespace {

/// The rows of a forward pass.
struct ForwardRows {
  /// The mask if a CUDA graph is being captured: all rows are then computed. Otherwise undefined.
  at::Tensor captured_mask;
  DivergenceRows rows;
};

ForwardRows SelectForwardRows(const DivergenceInputs& inputs, const DivergenceOptions& options) {
  const at::Tensor mask = FlatMask(inputs);
  const bool is_capturing = IsCapturing(inputs.student_hidden);
  return {is_capturing ? mask : at::Tensor(),
          SelectRows(is_capturing ? at::Tensor() : mask, inputs, options)};
}

at::Tensor EmptyStatistics(const DivergenceRows& rows) {
  return at::empty({rows.size(), kNumStatistics}, rows.student_hidden.options().dtype(at::kDouble));
}

/// Writes the rows' statistics and, if `gradients` [n, GradientPitch] is defined, the gradients of
/// their divergences with respect to the dot products.
void Summarize(const DivergenceRows& rows, const DivergenceOptions& options,
               const at::Tensor& statistics, const at::Tensor& gradients) {
  DivergenceRowBytes row_bytes = rows.row_bytes();
  row_bytes.gradient = 0;  // block_bytes is without the cache.
  const BlockRows blocks = BlocksWithin(options.block_bytes, rows.size(), row_bytes);
  DivergenceCoefficients ones;
  if (gradients.defined()) ones.divergence = at::ones({rows.size(), 1}, statistics.options());
  const RowDivergence& ops = rows.ops();
  ForEachBlock(rows, blocks.logits, [&](const DivergenceBlock& block, int64_t begin) {
    const int64_t size = block.student_dots.size(0);
    const at::Tensor block_statistics = statistics.narrow(0, begin, size);
    ops.Sum(block, block_statistics);
    if (!gradients.defined()) return;
    ops.FormGradient(block, block_statistics, ones.Slice(begin, size),
                     gradients.narrow(0, begin, size).narrow(1, 0, rows.columns()));
  });
}

/// Computes the gradients of the rows: with `computes_statistics` writes their statistics first,
/// otherwise reads them.
InputGradients Differentiate(const DivergenceRows& rows, const at::Tensor& statistics,
                             bool computes_statistics, const DivergenceCoefficients& coefficients,
                             const DivergenceInputs& inputs, const DivergenceOptions& options,
                             GradientNeeds needs) {
  const BlockRows blocks = BlocksWithin(options.block_bytes, rows.size(), rows.row_bytes());
  StudentGradients sums(inputs, rows, needs, /*is_at_once=*/blocks.gradients >= rows.size());
  const at::Tensor buffer = rows.EmptyGradients(std::min(blocks.gradients, rows.size()));
  const RowDivergence& ops = rows.ops();
  for (int64_t begin = 0; begin < rows.size(); begin += blocks.gradients) {
    const int64_t size = std::min(blocks.gradients, rows.size() - begin);
    const DivergenceRows chunk = rows.Slice(begin, size);
    const at::Tensor gradient = buffer.narrow(0, 0, size).narrow(1, 0, rows.columns());
    ForEachBlock(chunk, blocks.logits, [&](const DivergenceBlock& block, int64_t first) {
      const int64_t num_rows = block.student_dots.size(0);
      const at::Tensor block_statistics = statistics.narrow(0, begin + first, num_rows);
      if (computes_statistics) ops.Sum(block, block_statistics);
      ops.FormGradient(block, block_statistics, coefficients.Slice(begin + first, num_rows),
                       gradient.narrow(0, first, num_rows));
    });
    sums.Add(chunk, begin, gradient, /*factors=*/{});
  }
  return sums.Result(rows.subset);
}

/// Returns a column of the statistics as a result for all rows, shaped like the inputs' rows.
at::Tensor ResultOf(const at::Tensor& statistics, DivergenceStatistic column,
                    const DivergenceInputs& inputs) {
  const auto shape = inputs.student_hidden.sizes();
  return statistics.select(1, column).to(WideDtype(inputs)).view(shape.slice(0, shape.size() - 1));
}

/// Returns an uninitialised cache of all rows' gradients, or one without rows if memory is short.
at::Tensor AllocateCache(const DivergenceRows& rows) {
  try {
    return rows.EmptyGradients(rows.subset.num_all);
  } catch (const c10::OutOfMemoryError&) {
    return rows.EmptyGradients(0);
  }
}

/// Returns the statistics of the rows as those of all rows. Masked rows hold zeros.
at::Tensor OfAllRows(const at::Tensor& statistics, const ForwardRows& pass) {
  const at::Tensor all = pass.rows.subset.ScatterToAll(statistics);
  return pass.captured_mask.defined() ? at::where(pass.captured_mask.unsqueeze(1), all, 0) : all;
}

/// Returns the gradients of `rows` from a forward pass's cache, which holds the rows of the mask,
/// one after another.
at::Tensor CachedGradients(const at::Tensor& cache, const at::Tensor& mask,
                           const DivergenceRows& rows) {
  const at::Tensor& indices = rows.subset.row_indices;
  if (!indices.defined()) return cache;
  if (!mask.defined()) return cache.index_select(0, indices);
  const bool is_every_cached_row = mask.sum().item<int64_t>() == rows.size();
  if (is_every_cached_row) return cache.narrow(0, 0, rows.size());
  return cache.index_select(0, mask.cumsum(0).index_select(0, indices).sub_(1));
}

}  // namespace

DivergenceOutputs ForwardDivergence(const DivergenceInputs& inputs,
                                    const DivergenceOptions& options) {
  // Autocast must not change the dtypes that are chosen here.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  CheckArguments(inputs, options);
  WarnOfSlowProducts(inputs);
  const ForwardRows pass = SelectForwardRows(inputs, options);
  const DivergenceRows& rows = pass.rows;
  const GradientCacheKind cache_kind = rows.row_bytes().cache_kind;
  const bool is_cached = options.keep_gradient != GradientCacheKind::kNone;
  TORCH_CHECK_VALUE(!is_cached || options.keep_gradient == cache_kind, "keep_gradient is ",
                    static_cast<int64_t>(options.keep_gradient), ": it must be 0 or ",
                    static_cast<int64_t>(cache_kind), " for these inputs");
  DivergenceOutputs outputs;
  outputs.cache = is_cached ? AllocateCache(rows)
                            : at::empty({0}, inputs.student_hidden.options().dtype(rows.wide));
  const at::Tensor statistics = EmptyStatistics(rows);
  Summarize(rows, options, statistics, outputs.cache.numel() > 0 ? outputs.cache : at::Tensor());
  outputs.statistics = OfAllRows(statistics, pass);
  outputs.divergence = ResultOf(outputs.statistics, kDivergence, inputs);
  outputs.entropy = ResultOf(outputs.statistics, kEntropy, inputs);
  return outputs;
}

InputGradients BackwardDivergence(const DivergenceUpstream& upstream,
                                  const DivergenceInputs& inputs, const DivergenceOptions& options,
                                  GradientNeeds needs) {
  needs.bias = needs.bias && inputs.student_bias.has_value();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor mask = FlatMask(inputs);
  const bool is_capturing = IsCapturing(inputs.student_hidden);
  const auto flat = [&](const MaybeTensor& values) {
    if (!values.has_value()) return at::Tensor();
    const at::Tensor wide = Flat(*values).to(at::kDouble);
    return is_capturing ? WithoutMasked(wide, mask) : wide;
  };
  const at::Tensor d_divergence = flat(upstream.divergence);
  const at::Tensor d_entropy = flat(upstream.entropy);
  at::Tensor is_selected;
  if (!is_capturing) {
    const int64_t num_all = inputs.student_hidden.numel() / inputs.student_hidden.size(-1);
    is_selected = at::zeros({num_all}, inputs.student_hidden.options().dtype(at::kBool));
    if (d_divergence.defined()) is_selected.logical_or_(d_divergence != 0);
    if (d_entropy.defined()) is_selected.logical_or_(d_entropy != 0);
    if (mask.defined()) is_selected.logical_and_(mask);
  }
  const DivergenceRows rows = SelectRows(is_selected, inputs, options);
  const auto gather = [&](const at::Tensor& values) {
    return rows.subset.GatherFromAll(values).contiguous();
  };
  const auto coefficients_of = [&](const at::Tensor& values) {
    return values.defined() ? gather(values).unsqueeze(1) : values;
  };
  const DivergenceCoefficients coefficients = {coefficients_of(d_divergence),
                                               coefficients_of(d_entropy)};
  const bool has_cache = upstream.cache.has_value() && upstream.cache->numel() > 0;
  if (!has_cache || d_entropy.defined()) {
    return Differentiate(rows, gather(upstream.statistics), /*computes_statistics=*/false,
                         coefficients, inputs, options, needs);
  }
  const at::Tensor gradient = CachedGradients(*upstream.cache, mask, rows);
  StudentGradients sums(inputs, rows, needs, /*is_at_once=*/rows.size() <= kBlockRows);
  for (int64_t begin = 0; begin < rows.size(); begin += kBlockRows) {
    const int64_t size = std::min(kBlockRows, rows.size() - begin);
    sums.Add(rows.Slice(begin, size), begin,
             SliceRows(gradient, begin, size).narrow(1, 0, rows.columns()),
             SliceRows(coefficients.divergence, begin, size).to(rows.wide));
  }
  return sums.Result(rows.subset);
}

DivergenceLoss ForwardDivergenceLoss(const DivergenceInputs& inputs,
                                     const DivergenceOptions& options,
                                     const MaybeTensor& row_weights, bool is_mean,
                                     GradientNeeds needs) {
  needs.bias = needs.bias && inputs.student_bias.has_value();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  CheckArguments(inputs, options);
  CheckRowWeights(row_weights, inputs);
  WarnOfSlowProducts(inputs);
  const ForwardRows pass = SelectForwardRows(inputs, options);
  const DivergenceRows& rows = pass.rows;
  const at::Tensor statistics = EmptyStatistics(rows);
  at::Tensor weights = row_weights.has_value()
                           ? rows.subset.GatherFromAll(Flat(*row_weights)).to(at::kDouble)
                           : at::ones({rows.size()}, statistics.options());
  weights = WithoutMasked(weights, pass.captured_mask);
  if (is_mean && pass.captured_mask.defined()) {
    weights = weights / pass.captured_mask.sum().clamp_min(1);
  } else if (is_mean) {
    weights = weights / static_cast<double>(std::max<int64_t>(rows.size(), 1));
  }
  DivergenceLoss result;
  if (needs.any()) {
    result.gradients =
        Differentiate(rows, statistics, /*computes_statistics=*/true,
                      {weights.contiguous().unsqueeze(1), /*entropy=*/{}}, inputs, options, needs);
  } else {
    result.gradients =
        EmptyGradients(inputs.student_hidden, inputs.student_weight, inputs.student_bias, needs);
    Summarize(rows, options, statistics, /*gradients=*/{});
  }
  const at::Tensor divergence = statistics.select(1, kDivergence);
  result.loss = at::where(weights == 0, 0, weights * divergence).sum().to(rows.wide);
  const at::Tensor all = OfAllRows(statistics, pass);
  result.divergence = ResultOf(all, kDivergence, inputs);
  result.entropy = ResultOf(all, kEntropy, inputs);
  return result;
}

}  // namespace logprobd::torch_ops
