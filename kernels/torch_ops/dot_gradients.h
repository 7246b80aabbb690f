#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "kernels/torch_ops/backward_rows.h"
#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/logits.h"
#include "kernels/torch_ops/shard.h"

namespace logprobd::torch_ops {

/// The gradient of the loss with respect to the dot products hidden . weight of a block of rows,
/// formed a block of columns at a time.
class DotGradients {
 public:
  virtual ~DotGradients() = default;

  /// The block of the shard's columns from `begin` on for which `Of` is to be asked next: all of
  /// them one after another, from 0 on, each once.
  virtual Columns Next(int64_t begin) const = 0;

  /// [n, columns], of rows of a search only those that it finds, in the dtype in which it is
  /// multiplied with the weight and the hidden states: theirs where these are multiplied as they
  /// are (products.h), else the wide type. It holds until the next call. The bias's gradient is
  /// added up on the way.
  virtual at::Tensor Of(Columns columns) = 0;

  /// What a row of `Of` must yet be multiplied by, fp32 [n, 1]; undefined: by nothing.
  virtual at::Tensor RowFactors() const { return {}; }
};

/// What DotGradients are made from; all outlive them.
struct DotGradientsArguments {
  const BackwardRows& rows;
  const LinearLogprobInputs& inputs;
  const LinearLogprobOptions& options;
  const Shard& shard;
  at::Tensor bias_sum;  ///< [V] in the wide type, to which the bias's gradient is added; undefined:
                        ///< not needed.
};

/// The way of forming them that fits the arguments.
std::unique_ptr<DotGradients> MakeDotGradients(const DotGradientsArguments& arguments);

}  // namespace logprobd::torch_ops
