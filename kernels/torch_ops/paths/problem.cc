#include "kernels/torch_ops/paths/problem.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/torch_ops/paths/scoring_path.h"
#include "kernels/torch_ops/rows/device_ops.h"

namespace logprobd::torch_ops {

Problem::Problem(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options)
    : Pass{inputs, options, WideDtype(inputs.hidden.scalar_type(), inputs.weight.scalar_type()),
           &DeviceOps::For(inputs.hidden.device().type())},
      group(options.parallel.group) {
  is_alone = group.is_alone();
  // With one rank, hidden has all rows.
  if (is_alone) this->options.parallel.sequence_parallel = false;
}

void Problem::Plan() {
  path = &ChoosePath(*this);
  const VocabularyParallel& parallel = options.parallel;
  const int64_t weight_end = ShardIds(inputs.weight, parallel).end;
  shard = Shard(inputs.weight, parallel,
                is_alone ? weight_end : std::max(weight_end, parallel.vocab_valid));
  at::Tensor& hidden = inputs.hidden;
  if (hidden.dim() != 2) hidden = hidden.reshape({-1, hidden.size(-1)});
  inputs.target = inputs.target.to(at::kLong).contiguous();
  // The temperature of an ignored row may be 0 or NaN. It is replaced where it would be read: in a
  // CUDA graph, which computes all rows, and in the gradients of lists.
  const bool reads_ignored_rows =
      device_ops->IsCapturing(device()) || options.top_k > 0 || inputs.candidate_ids.has_value();
  if (inputs.row_temperature.has_value() && reads_ignored_rows) {
    inputs.row_temperature =
        at::where(inputs.target == options.ignore_index, 1, *inputs.row_temperature);
  }
  if (parallel.sequence_parallel) {
    hidden = hidden.contiguous();
    gathered_hidden = at::empty({num_rows(), hidden_size()}, hidden.options());
  }
  path->AlignInputs(inputs);
}

Problem Problem::ForRows(const Rows& rows) const {
  Problem part = *this;
  part.inputs.hidden = rows.hidden;
  part.inputs.target = rows.target();
  if (rows.temperature.defined()) part.inputs.row_temperature = rows.temperature;
  return part;
}

at::Tensor Problem::HiddenOfAllRows() {
  if (!options.parallel.sequence_parallel) return inputs.hidden;
  group.GatherInto(gathered_hidden, inputs.hidden);
  return std::exchange(gathered_hidden, {});
}

}  // namespace logprobd::torch_ops
