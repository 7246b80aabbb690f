#include "kernels/torch_ops/fused_row_selection.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include "kernels/rows/select_rows.h"
#include "kernels/torch_ops/device_arrays.h"

namespace logprobd::torch_ops {
namespace {

bool IsCaptured() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace

std::optional<RowSelection> SelectRowsOnGpu(const at::Tensor& target, int64_t ignore_index,
                                            const UpstreamGradients& upstream, IdRange owned) {
  if (!target.is_cuda()) return std::nullopt;
  const c10::cuda::CUDAGuard on_device(target.device());
  if (IsCaptured()) return RowSelection{.index = {}, .are_unseen = true};
  const UpstreamArrays gradients(upstream);
  if (!gradients.AreFp32On(target.device())) return std::nullopt;
  const at::Tensor targets = target.contiguous();
  const at::Tensor index = at::empty_like(targets);
  // Of the host: the kernel writes it, and no copy need follow.
  const at::Tensor selected = at::empty({static_cast<int64_t>(sizeof(kernels::SelectedRows))},
                                        at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  kernels::SelectRowsParams params;
  params.num_rows = targets.size(0);
  params.targets = targets.const_data_ptr<int64_t>();
  params.ignore_index = ignore_index;
  params.gradients[0] = gradients.logprob();
  params.gradients[1] = gradients.entropy();
  params.gradients[2] = gradients.lse();
  params.gradients[3] = gradients.mean_logit();
  params.first_id = owned.begin;
  params.end_id = owned.end;
  params.index = index.mutable_data_ptr<int64_t>();
  params.selected = static_cast<kernels::SelectedRows*>(selected.mutable_data_ptr());
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  CheckLaunch(LaunchSelectRows(params, stream), "the search for rows that count");
  CheckLaunch(cudaStreamSynchronize(stream), "the search for rows that count");
  const kernels::SelectedRows& found = *params.selected;
  RowSelection selection;
  if (found.num_selected < params.num_rows) {
    selection.index = index.narrow(0, 0, found.num_selected);
  }
  selection.has_all_counted = found.num_selected == found.num_counted;
  selection.num_unowned = found.num_unowned;
  selection.first_unowned = found.first_unowned;
  if (found.num_selected > 0) {
    selection.targets = IdRange::From(found.least_target, found.greatest_target);
  }
  selection.target_checksum = found.target_checksum;
  return selection;
}

}  // namespace logprobd::torch_ops
