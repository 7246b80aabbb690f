#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/logit_cache.h"
#include "kernels/torch_ops/rows.h"

namespace logprobd::torch_ops {

/// The rows that are differentiated, and what is known of all rows.
struct BackwardRows {
  Rows rows;
  CachedRows cached;
  UpstreamGradients upstream;  ///< Of all rows.
  SavedOutputs saved;          ///< Of all rows.

  /// `size` of them from `begin` on.
  BackwardRows Part(int64_t begin, int64_t size) const;
};

/// The rows that count and that any upstream gradient reaches, as `reached` has them: the others
/// cost nothing and get exact zeros. `hidden` is that of all rows of target, [num_all, H].
BackwardRows RowsReached(const RowSelection& reached, const at::Tensor& hidden,
                         const UpstreamGradients& upstream, const LinearLogprobInputs& inputs,
                         const SavedOutputs& saved, const LinearLogprobOptions& options);

}  // namespace logprobd::torch_ops
