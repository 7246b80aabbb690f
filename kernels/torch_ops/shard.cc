#include "kernels/torch_ops/shard.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <limits>

namespace logprobd::torch_ops {

namespace {

/// What sums in fixed point hold: kernels/common/row_sums.h.
constexpr int64_t kVocabSizeMax = int64_t{1} << 20;

void SortByBegin(std::vector<IdRange>& parts) {
  std::sort(parts.begin(), parts.end(),
            [](const IdRange& a, const IdRange& b) { return a.begin < b.begin; });
}

}  // namespace

Shard::Shard(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options, int64_t end)
    : begin(options.vocab_start), vocab_size(end) {
  TORCH_CHECK_VALUE(vocab_size <= kVocabSizeMax, "the vocabulary has ", vocab_size,
                    " ids: at most ", kVocabSizeMax, " are served");
  TORCH_CHECK_VALUE(options.vocab_valid <= vocab_size, "vocab_valid is ", options.vocab_valid,
                    ", and the weight ends at ", vocab_size);
  if (options.vocab_valid > 0) vocab_size = options.vocab_valid;
  columns = std::clamp<int64_t>(vocab_size - begin, 0, inputs.weight.size(0));
}

at::Tensor Shard::MeanLogitWeights(const LinearLogprobInputs& inputs,
                                   Columns columns_wanted) const {
  if (inputs.mean_logit_weights.has_value()) {
    return inputs.mean_logit_weights->narrow(0, columns_wanted.begin, columns_wanted.size())
        .to(at::kDouble);
  }
  return at::full({columns_wanted.size()}, 1.0 / static_cast<double>(vocab_size),
                  inputs.hidden.options().dtype(at::kDouble));
}

IdRange IdsOfShard(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options) {
  return {options.vocab_start, options.vocab_start + inputs.weight.size(0)};
}

Shard ShardSoFar(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options) {
  return {inputs, options, std::max(IdsOfShard(inputs, options).end, options.vocab_valid)};
}

void CheckParts(std::vector<IdRange> parts) {
  SortByBegin(parts);
  int64_t reached = std::numeric_limits<int64_t>::min();
  for (const IdRange& part : parts) {
    if (part.begin >= part.end) continue;
    TORCH_CHECK_VALUE(part.begin >= reached, "vocab_start: several ranks have the same ids, from ",
                      part.begin, " on; their parts must not overlap");
    reached = part.end;
  }
}

bool AreOwned(IdRange targets, std::vector<IdRange> parts) {
  SortByBegin(parts);
  int64_t reached = targets.begin;
  for (const IdRange& part : parts) {
    if (part.begin > reached) break;  // a gap
    reached = std::max(reached, part.end);
  }
  return reached >= targets.end;
}

RowSelection SelectCountedRows(const LinearLogprobInputs& inputs,
                               const LinearLogprobOptions& options, const RankGroup& group,
                               const UpstreamGradients& upstream, Search search) {
  const at::Tensor target = FlatTarget(inputs);
  if (!group.is_alone()) {
    return CompactRows(target, options.ignore_index, upstream, /*owned=*/{}, search);
  }
  const Shard shard(inputs, options, IdsOfShard(inputs, options).end);
  RowSelection selection = CompactRows(target, options.ignore_index, upstream, shard.ids(), search);
  CheckOwned(selection, target, options, shard.vocab_size);
  return selection;
}

}  // namespace logprobd::torch_ops
