#include "kernels/torch_ops/paths/logit_cache.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace logprobd::torch_ops {
namespace {

/// The number of cached rows is a multiple of this, since the fused kernels compute whole tiles.
constexpr int64_t kCachedRowsMultiple = 256;

struct CacheFormat {
  at::ScalarType dtype;
  c10::SymInt pitch;  // elements from one row to the next
};

CacheFormat FormatOf(LogitCacheKind kind, at::ScalarType wide, const c10::SymInt& weight_rows) {
  switch (kind) {
    case LogitCacheKind::kNone:
      return {wide, 0};
    case LogitCacheKind::kWide:
      return {wide, weight_rows};
    case LogitCacheKind::kExponentials:
    case LogitCacheKind::kRebasedExponentials:
      return {at::kByte, CachedRowLayout(weight_rows).row_bytes()};
  }
  TORCH_CHECK_VALUE(false, "keep_logits is ", static_cast<int64_t>(kind), ": it must be 0, 1 or 2");
}

c10::SymInt NumCachedRows(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options) {
  if (options.memory.keep_logits == LogitCacheKind::kNone) return 0;
  const c10::SymInt num_rows = inputs.target.sym_numel();
  return options.memory.cached_rows < 0 ? num_rows : num_rows.min(options.memory.cached_rows);
}

/// Returns the indices of `rows` among the valid rows, or an undefined tensor if `rows` are all of
/// the valid rows.
at::Tensor IndicesAmongValid(const Rows& rows, const Problem& problem) {
  if (rows.pending != nullptr) return rows.pending->valid_indices();
  if (!rows.row_indices.defined()) return {};
  const at::Tensor is_valid = problem.inputs.target.reshape({-1}) != problem.options.ignore_index;
  const at::Tensor num_valid = is_valid.cumsum(0);
  if (num_valid[-1].item<int64_t>() == rows.size()) return {};
  return rows.GatherFromAll(num_valid).sub_(1);
}

}  // namespace

bool CanRebaseExponentials(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options) {
  // The range of fp16 is too small for the exponentials.
  return options.softcap == 0 && inputs.weight.scalar_type() == at::kBFloat16;
}

LinearLogprobOptions WithRebasedCache(const LinearLogprobInputs& inputs,
                                      LinearLogprobOptions options) {
  // The bias's gradient is summed over rows before they are multiplied by their factors.
  // Gradients of lists are written over single elements, whatever the row's factor is.
  const bool has_lists = options.top_k > 0 || inputs.candidate_ids.has_value();
  const bool is_linear =
      !options.need_entropy && !options.need_mean_logit && !inputs.bias.has_value() && !has_lists;
  if (options.memory.keep_logits == LogitCacheKind::kExponentials && is_linear &&
      CanRebaseExponentials(inputs, options)) {
    options.memory.keep_logits = LogitCacheKind::kRebasedExponentials;
  }
  return options;
}

int64_t CachedRowBytes(LogitCacheKind kind, at::ScalarType wide, int64_t weight_rows) {
  const CacheFormat format = FormatOf(kind, wide, weight_rows);
  return format.pitch.expect_int() * static_cast<int64_t>(c10::elementSize(format.dtype));
}

int64_t GradientBytesBeside(int64_t cache_bytes) {
  return std::min(kGradientBytesMax, cache_bytes);
}

int64_t CachedRowsWithin(int64_t budget_bytes, LogitCacheKind kind, at::ScalarType wide,
                         int64_t weight_rows) {
  const int64_t row_bytes = std::max<int64_t>(CachedRowBytes(kind, wide, weight_rows), 1);
  if (kind == LogitCacheKind::kWide) return budget_bytes / row_bytes;
  const int64_t rows = (budget_bytes - GradientBytesBeside(budget_bytes / 2)) / row_bytes;
  return rows / kCachedRowsMultiple * kCachedRowsMultiple;
}

bool IsPartlyCached(const Problem& problem) {
  const int64_t rows = problem.options.memory.cached_rows;
  return problem.options.memory.keep_logits != LogitCacheKind::kNone && rows >= 0 &&
         rows < problem.num_rows();
}

at::Tensor EmptyLogitCache(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options) {
  const CacheFormat format =
      FormatOf(options.memory.keep_logits,
               WideDtype(inputs.hidden.scalar_type(), inputs.weight.scalar_type()),
               inputs.weight.sym_size(0));
  return at::empty_symint({NumCachedRows(inputs, options), format.pitch},
                          inputs.hidden.options().dtype(format.dtype));
}

at::Tensor EmptyLogitCache(int64_t num_rows, const Problem& problem) {
  const CacheFormat format =
      FormatOf(problem.options.memory.keep_logits, problem.wide, problem.inputs.weight.size(0));
  return at::empty({num_rows, format.pitch.expect_int()},
                   problem.inputs.hidden.options().dtype(format.dtype));
}

void CacheLogits(const at::Tensor& cache_rows, Columns columns, const at::Tensor& logits) {
  cache_rows.narrow(1, columns.begin, columns.size())
      .copy_(SliceRows(logits, 0, cache_rows.size(0)));
}

CachedRows CachedRows::Slice(int64_t begin, int64_t size) const {
  const int64_t count = std::min(begin + size, this->size()) - begin;
  if (count <= 0) return {};
  if (row_indices.defined()) return {cache, SliceRows(row_indices, begin, count)};
  return {SliceRows(cache, begin, count), {}};
}

at::Tensor CachedRows::Logits(Columns columns) const {
  const at::Tensor block = cache.narrow(1, columns.begin, columns.size());
  return row_indices.defined() ? block.index_select(0, row_indices) : block;
}

CachedRows FindCachedRows(const MaybeTensor& cache, const Rows& rows, const Problem& problem) {
  if (problem.options.memory.keep_logits == LogitCacheKind::kNone || !cache.has_value()) return {};
  const CacheFormat format =
      FormatOf(problem.options.memory.keep_logits, problem.wide, problem.inputs.weight.size(0));
  const int64_t num_cached = NumCachedRows(problem.inputs, problem.options).expect_int();
  TORCH_CHECK_VALUE(cache->scalar_type() == format.dtype && cache->dim() == 2 &&
                        cache->size(0) == num_cached && cache->sym_size(1) == format.pitch,
                    "cache is ", cache->scalar_type(), " with the shape ", cache->sizes(),
                    ": it must be the tensor that the forward returned, ", format.dtype,
                    " with the shape [", num_cached, ", ", format.pitch, "]");
  at::Tensor indices = IndicesAmongValid(rows, problem);
  if (indices.defined() && IsPartlyCached(problem)) {
    indices = indices.narrow(0, 0, indices.lt(num_cached).sum().item<int64_t>());
  }
  return CachedRows{*cache, indices}.Slice(0, rows.size());
}

}  // namespace logprobd::torch_ops
