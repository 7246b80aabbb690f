#include "kernels/torch_ops/fused_row_selection.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <optional>

#include "kernels/row_ops/compact_rows.h"
#include "kernels/row_ops/copy_and_scale.h"
#include "kernels/torch_ops/device_arrays.h"
#include "kernels/torch_ops/views.h"

namespace logprobd::torch_ops {
namespace {

class GpuRowCompaction : public RowCompaction {
 public:
  GpuRowCompaction(const at::Tensor& targets, int64_t ignore_index, const UpstreamArrays& gradients,
                   IdRange owned, Search search)
      : num_rows_(targets.size(0)),
        has_places_(search == Search::kUnderWay),
        found_(at::empty({count_place() + 1}, targets.options())),
        // Of the host: the kernel writes it, and no copy need follow.
        selected_(at::empty({static_cast<int64_t>(sizeof(kernels::CompactedRows))},
                            at::TensorOptions().dtype(at::kByte).pinned_memory(true))) {
    kernels::CompactRowsParams params;
    params.num_rows = num_rows_;
    params.targets = targets.const_data_ptr<int64_t>();
    params.ignore_index = ignore_index;
    params.gradients[0] = gradients.logprob();
    params.gradients[1] = gradients.entropy();
    params.gradients[2] = gradients.lse();
    params.gradients[3] = gradients.mean_logit();
    params.first_id = owned.begin;
    params.end_id = owned.end;
    params.row_indices = found_.mutable_data_ptr<int64_t>();
    if (has_places_) params.valid_indices = params.row_indices + num_rows_;
    params.num_compacted = params.row_indices + count_place();
    params.result = static_cast<kernels::CompactedRows*>(selected_.mutable_data_ptr());
    CheckLaunch(LaunchCompactRows(params, at::cuda::getCurrentCUDAStream()),
                "the search for rows that count");
    end_.record();
  }

  ~GpuRowCompaction() override {
    // The kernel must not write to memory of the host that is somebody else's.
    if (!result_.has_value()) C10_CUDA_CHECK_WARN(cudaEventSynchronize(end_.event()));
  }

  GpuRowCompaction(const GpuRowCompaction&) = delete;
  GpuRowCompaction& operator=(const GpuRowCompaction&) = delete;

  at::Tensor index() const override { return found_.narrow(0, 0, num_rows_); }
  at::Tensor valid_indices() const override {
    TORCH_INTERNAL_ASSERT(has_places_);
    return found_.narrow(0, num_rows_, num_rows_);
  }
  at::Tensor Gather(const at::Tensor& values) const override {
    const c10::cuda::CUDAGuard on_device(values.device());
    constexpr int64_t kTileRows = 256;
    const int64_t whole = (num_rows_ + kTileRows - 1) / kTileRows * kTileRows;
    at::Tensor rows = RowsFrom(at::empty({whole, values.size(1)}, values.options()), 0, num_rows_);
    if (!AreInWholeVectors(values)) return at::index_select_out(rows, values, 0, index());
    kernels::CopyRowsParams params = CopyOf(values, rows);
    params.row_indices = found_.const_data_ptr<int64_t>();
    CheckLaunch(LaunchCopyRows(params, at::cuda::getCurrentCUDAStream()),
                "the rows that count, one behind the other");
    return rows;
  }
  const int64_t* count() const override { return found_.const_data_ptr<int64_t>() + count_place(); }

  const RowSelection& Result() override {
    if (result_.has_value()) return *result_;
    end_.synchronize();
    const auto& found = *static_cast<const kernels::CompactedRows*>(selected_.const_data_ptr());
    RowSelection& result = result_.emplace();
    if (found.num_compacted < num_rows_) result.index = found_.narrow(0, 0, found.num_compacted);
    result.has_all_counted = found.num_compacted == found.num_valid;
    result.num_out_of_vocab = found.num_out_of_vocab;
    result.first_out_of_vocab = found.first_out_of_vocab;
    if (found.num_compacted > 0) {
      result.targets = IdRange::From(found.min_target, found.max_target);
    }
    result.target_checksum = found.target_checksum;
    return result;
  }

 private:
  int64_t count_place() const { return (has_places_ ? 2 : 1) * num_rows_; }

  const int64_t num_rows_;
  const bool has_places_;
  const at::Tensor found_;  // index, counted places and the count, one behind the other
  const at::Tensor selected_;
  at::cuda::CUDAEvent end_;
  std::optional<RowSelection> result_;
};

}  // namespace

bool IsCaptured(const at::Device& device) {
  if (!device.is_cuda()) return false;
  const c10::cuda::CUDAGuard on_device(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

std::shared_ptr<RowCompaction> StartRowCompaction(const at::Tensor& target, int64_t ignore_index,
                                                  const UpstreamGradients& upstream, IdRange owned,
                                                  Search search) {
  const UpstreamArrays gradients(upstream);
  if (!target.is_cuda() || !gradients.AreFp32On(target.device())) return nullptr;
  const c10::cuda::CUDAGuard on_device(target.device());
  return std::make_shared<GpuRowCompaction>(target.contiguous(), ignore_index, gradients, owned,
                                            search);
}

}  // namespace logprobd::torch_ops
