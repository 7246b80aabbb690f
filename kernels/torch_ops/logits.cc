#include "kernels/torch_ops/logits.h"

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/tanh.h>

#include <algorithm>

#include "kernels/common/tile.h"
#include "kernels/torch_ops/products.h"

namespace logprobd::torch_ops {
namespace {

using kernels::kTileColumns;

}  // namespace

Columns BlockOfColumns(int64_t begin, int64_t columns, int64_t vocab_start, int64_t block_rows) {
  const int64_t tiles =
      std::max<int64_t>(kBlockLogits / (std::max<int64_t>(block_rows, 1) * kTileColumns), 1);
  const int64_t tile = (vocab_start + begin) / kTileColumns;
  return {begin, std::min(columns, (tile + tiles) * kTileColumns - vocab_start)};
}

std::vector<Columns> CutColumns(int64_t columns, int64_t vocab_start, int64_t block_rows) {
  std::vector<Columns> cut;
  for (int64_t begin = 0; begin < columns; begin = cut.back().end) {
    cut.push_back(BlockOfColumns(begin, columns, vocab_start, block_rows));
  }
  return cut;
}

at::Tensor BlockLogits(const at::Tensor& hidden, const LinearLogprobInputs& inputs,
                       const LinearLogprobOptions& options, Columns columns, at::ScalarType wide) {
  const at::Tensor weight = inputs.weight.narrow(0, columns.begin, columns.size());
  at::Tensor logits = WideProduct(hidden, weight.t(), wide);
  if (options.scale != 1) logits.mul_(options.scale);
  if (inputs.bias.has_value()) {
    logits.add_(inputs.bias->narrow(0, columns.begin, columns.size()).to(wide));
  }
  if (options.softcap <= 0) return logits;
  // In fp64: three roundings to fp32 would cost more than the product's.
  const double cap = options.softcap;
  return logits.to(at::kDouble).div_(cap).tanh_().mul_(cap).to(wide);
}

at::Tensor PerTemperature(double factor, const Rows& rows, const LinearLogprobOptions& options,
                          at::ScalarType wide) {
  if (!rows.temperature.defined()) {
    return at::full({rows.size(), 1}, factor / options.temperature,
                    rows.hidden.options().dtype(wide));
  }
  const at::Tensor temperature = rows.temperature.to(at::kDouble).unsqueeze(1);
  return at::full_like(temperature, factor).div_(temperature).to(wide);
}

}  // namespace logprobd::torch_ops
