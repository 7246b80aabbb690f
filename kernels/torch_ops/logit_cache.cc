#include "kernels/torch_ops/logit_cache.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "kernels/torch_ops/kept_row.h"
#include "kernels/torch_ops/views.h"

namespace logprobd::torch_ops {
namespace {

/// Places of `rows` among those that count; undefined: they are all of these.
at::Tensor PlacesAmongCounted(const Rows& rows, const LinearLogprobInputs& inputs,
                              const LinearLogprobOptions& options) {
  if (rows.search != nullptr) return rows.search->valid_indices();
  if (!rows.index.defined()) return {};
  const at::Tensor counts = inputs.target.reshape({-1}) != options.ignore_index;
  const at::Tensor counted = counts.cumsum(0);
  if (counted[-1].item<int64_t>() == rows.size()) return {};
  return rows.Select(counted).sub_(1);
}

}  // namespace

LogitCacheFormat FormatOfLogitCache(const LinearLogprobInputs& inputs,
                                    const LinearLogprobOptions& options) {
  const at::ScalarType wide = WideType(inputs);
  switch (options.keep_logits) {
    case KeptLogits::kNone:
      return {wide, 0, 0};
    case KeptLogits::kWide:
      return {wide, inputs.target.sym_numel(), inputs.weight.sym_size(0)};
    case KeptLogits::kExponentials:
    case KeptLogits::kRebasedExponentials:
      return {at::kByte, inputs.target.sym_numel(),
              KeptRowOf(inputs.weight.sym_size(0)).row_bytes()};
  }
  TORCH_CHECK_VALUE(false, "keep_logits is ", static_cast<int64_t>(options.keep_logits),
                    ": it must be 0, 1 or 2");
}

at::Tensor RoomForLogits(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options) {
  const LogitCacheFormat format = FormatOfLogitCache(inputs, options);
  return at::empty_symint({format.rows, format.pitch}, inputs.hidden.options().dtype(format.dtype));
}

at::Tensor RoomForLogitsOf(int64_t num_rows, const LinearLogprobInputs& inputs,
                           const LinearLogprobOptions& options) {
  const LogitCacheFormat format = FormatOfLogitCache(inputs, options);
  return at::empty({num_rows, format.pitch.expect_int()},
                   inputs.hidden.options().dtype(format.dtype));
}

void KeepLogits(const at::Tensor& cache_rows, Columns columns, const at::Tensor& logits) {
  cache_rows.narrow(1, columns.begin, columns.size()).copy_(logits);
}

CachedRows CachedRows::Part(int64_t begin, int64_t size) const {
  if (!cache.defined()) return {};
  if (index.defined()) return {cache, RowsFrom(index, begin, size)};
  return {RowsFrom(cache, begin, size), {}};
}

at::Tensor CachedRows::Logits(Columns columns) const {
  const at::Tensor block = cache.narrow(1, columns.begin, columns.size());
  return index.defined() ? block.index_select(0, index) : block;
}

CachedRows FindCachedRows(const std::optional<at::Tensor>& cache, const Rows& rows,
                          const LinearLogprobInputs& inputs, const LinearLogprobOptions& options) {
  if (options.keep_logits == KeptLogits::kNone || !cache.has_value()) return {};
  const LogitCacheFormat format = FormatOfLogitCache(inputs, options);
  TORCH_CHECK_VALUE(cache->scalar_type() == format.dtype && cache->dim() == 2 &&
                        cache->sym_size(0) == format.rows && cache->sym_size(1) == format.pitch,
                    "cache is ", cache->scalar_type(), " of the shape ", cache->sizes(),
                    ": it must be what the forward returned, ", format.dtype, " [", format.rows,
                    ", ", format.pitch, "]");
  return CachedRows{*cache, PlacesAmongCounted(rows, inputs, options)}.Part(0, rows.size());
}

}  // namespace logprobd::torch_ops
