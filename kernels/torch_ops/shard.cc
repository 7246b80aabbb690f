#include "kernels/torch_ops/shard.h"

#include <ATen/ops/full.h>

#include <algorithm>

namespace logprobd::torch_ops {

Shard::Shard(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options,
             const RankGroup& group)
    : begin(options.vocab_start), vocab_size(options.vocab_start + inputs.weight.size(0)) {
  if (options.vocab_valid > 0) {
    vocab_size = options.vocab_valid;
  } else if (!group.is_alone()) {
    at::Tensor end = at::full({1}, vocab_size, inputs.hidden.options().dtype(at::kLong));
    group.Max(end);
    vocab_size = end.item<int64_t>();
  }
  columns = std::clamp<int64_t>(vocab_size - begin, 0, inputs.weight.size(0));
}

at::Tensor Shard::ColumnWeights(const LinearLogprobInputs& inputs, Columns columns_wanted) const {
  if (inputs.column_weights.has_value()) {
    return inputs.column_weights->narrow(0, columns_wanted.begin, columns_wanted.size())
        .to(at::kDouble);
  }
  return at::full({columns_wanted.size()}, 1.0 / static_cast<double>(vocab_size),
                  inputs.hidden.options().dtype(at::kDouble));
}

}  // namespace logprobd::torch_ops
