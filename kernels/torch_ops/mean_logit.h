#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/rank_group.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"

namespace logprobd::torch_ops {

/// The weighted mean of each row's logits over temperature, [n] in fp32; without a cap it takes no
/// logits. For 16-bit inputs on a GPU. Ranks of `group` call it together.
at::Tensor MeanLogit(const Rows& rows, const LinearLogprobInputs& inputs,
                     const LinearLogprobOptions& options, const Shard& shard,
                     const RankGroup& group);

}  // namespace logprobd::torch_ops
