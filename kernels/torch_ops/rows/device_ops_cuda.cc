// Implements operations on rows with CUDA kernels. For tensors that the kernels do not support, the
// versions of the base class are used.

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "kernels/row_ops/compact_rows.h"
#include "kernels/row_ops/copy_and_scale.h"
#include "kernels/row_ops/row_loss.h"
#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/rows/kernel_operands.h"
#include "kernels/torch_ops/types/kernel_dtype.h"
#include "kernels/torch_ops/types/loss.h"

namespace logprobd::torch_ops {
namespace {

using Clock = std::chrono::steady_clock;

/// The free memory of a GPU at some time, and the memory that PyTorch had reserved at that time. It
/// is stored because querying a GPU takes longer than a small training step.
struct FreeMemory {
  Clock::time_point time;
  int64_t free_bytes = 0;
  int64_t reserved_bytes = 0;
};
constexpr std::chrono::seconds kFreeMemoryAgeMax(1);

/// Returns the free bytes of the GPU. Changes by other processes may appear up to kFreeMemoryAgeMax
/// late.
int64_t DeviceFreeBytes(c10::DeviceIndex device, int64_t reserved_bytes) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, FreeMemory> known;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = known.try_emplace(device);
  FreeMemory& memory = found->second;
  if (is_new || Clock::now() - memory.time > kFreeMemoryAgeMax) {
    const c10::cuda::CUDAGuard on_device(device);
    const c10::cuda::CUDAStreamCaptureModeGuard while_capturing(cudaStreamCaptureModeRelaxed);
    size_t free = 0;
    size_t total = 0;
    CheckLaunch(cudaMemGetInfo(&free, &total), "the query of free GPU memory");
    memory = {Clock::now(), static_cast<int64_t>(free), reserved_bytes};
  }
  return memory.free_bytes + memory.reserved_bytes - reserved_bytes;
}

/// Runs a row compaction as one kernel, which writes its result to pinned host memory.
class CudaCompaction : public PendingCompaction {
 public:
  CudaCompaction(const at::Tensor& targets, int64_t ignore_index, const UpstreamArrays& gradients,
                 IdRange ids, Wait wait)
      : num_rows_(targets.size(0)),
        has_valid_indices_(wait == Wait::kLater),
        indices_(at::empty({count_offset() + 1}, targets.options())),
        // The kernel writes directly to this memory, because it is pinned, so no copy is needed.
        result_memory_(at::empty({static_cast<int64_t>(sizeof(kernels::CompactedRows))},
                                 at::TensorOptions().dtype(at::kByte).pinned_memory(true))) {
    kernels::CompactRowsParams params;
    params.num_rows = num_rows_;
    params.targets = targets.const_data_ptr<int64_t>();
    params.ignore_index = ignore_index;
    for (size_t i = 0; i < kUpstreamScores.size(); ++i) {
      params.gradients[i] = gradients.Of(kUpstreamScores[i]);
    }
    params.first_id = ids.begin;
    params.end_id = ids.end;
    params.row_indices = indices_.mutable_data_ptr<int64_t>();
    if (has_valid_indices_) params.valid_indices = params.row_indices + num_rows_;
    params.num_compacted = params.row_indices + count_offset();
    params.result = static_cast<kernels::CompactedRows*>(result_memory_.mutable_data_ptr());
    CheckLaunch(LaunchCompactRows(params, c10::cuda::getCurrentCUDAStream()), "the row compaction");
    end_.record(c10::cuda::getCurrentCUDAStream());
  }

  ~CudaCompaction() override {
    // The kernel must have finished before its host memory gets a new owner.
    if (!subset_.has_value()) {
      C10_CUDA_CHECK_WARN(cudaEventSynchronize(static_cast<cudaEvent_t>(end_.eventId())));
    }
  }

  CudaCompaction(const CudaCompaction&) = delete;
  CudaCompaction& operator=(const CudaCompaction&) = delete;

  at::Tensor row_indices() const override { return indices_.narrow(0, 0, num_rows_); }
  at::Tensor valid_indices() const override {
    TORCH_INTERNAL_ASSERT(has_valid_indices_);
    return indices_.narrow(0, num_rows_, num_rows_);
  }
  at::Tensor Gather(const at::Tensor& values) const override {
    const c10::cuda::CUDAGuard on_device(values.device());
    constexpr int64_t kTileRows = 256;
    const int64_t padded_rows = (num_rows_ + kTileRows - 1) / kTileRows * kTileRows;
    at::Tensor rows =
        SliceRows(at::empty({padded_rows, values.size(1)}, values.options()), 0, num_rows_);
    if (!IsVectorAligned(values)) return at::index_select_out(rows, values, 0, row_indices());
    kernels::CopyRowsParams params = CopyParams(values, rows);
    params.row_indices = indices_.const_data_ptr<int64_t>();
    CheckLaunch(LaunchCopyRows(params, c10::cuda::getCurrentCUDAStream()),
                "the copy of compacted rows");
    return rows;
  }
  const int64_t* count() const override {
    return indices_.const_data_ptr<int64_t>() + count_offset();
  }

  const RowSubset& Result() override {
    if (subset_.has_value()) return *subset_;
    end_.synchronize();
    const auto& result =
        *static_cast<const kernels::CompactedRows*>(result_memory_.const_data_ptr());
    RowSubset& subset = subset_.emplace();
    if (result.num_compacted < num_rows_) {
      subset.row_indices = indices_.narrow(0, 0, result.num_compacted);
    }
    subset.has_every_valid_row = result.num_compacted == result.num_valid;
    subset.num_out_of_vocab = result.num_out_of_vocab;
    subset.first_out_of_vocab = result.first_out_of_vocab;
    if (result.num_compacted > 0) {
      subset.targets = IdRange::From(result.min_target, result.max_target);
    }
    subset.target_checksum = result.target_checksum;
    return subset;
  }

 private:
  int64_t count_offset() const { return (has_valid_indices_ ? 2 : 1) * num_rows_; }

  const int64_t num_rows_;
  const bool has_valid_indices_;
  const at::Tensor indices_;  // row indices, valid indices and the count, one after another
  const at::Tensor result_memory_;
  c10::Event end_{c10::DeviceType::CUDA};
  std::optional<RowSubset> subset_;
};

class CudaOps : public DeviceOps {
 public:
  int64_t FreeBytes(int64_t device, int64_t enough) const override {
    namespace allocator = c10::cuda::CUDACachingAllocator;
    const auto index = static_cast<c10::DeviceIndex>(device);
    size_t largest = 1;  // With 0, cacheInfo would query the GPU.
    allocator::cacheInfo(index, &largest);
    const auto held = static_cast<int64_t>(largest);
    if (held >= enough) return held;
    // For a larger tensor PyTorch first returns to the GPU what it holds, except parts of segments
    // of which other parts are in use.
    const auto stats = allocator::getDeviceStats(index);
    const int64_t reserved = stats.reserved_bytes[0].current;
    int64_t kept = stats.active_bytes[0].current;
    if (!c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments()) {
      kept += stats.inactive_split_bytes[0].current;
    }
    return std::max(held, DeviceFreeBytes(index, reserved) + reserved - kept);
  }

  bool IsCapturing(at::Device device) const override {
    const c10::cuda::CUDAGuard on_device(device);
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }

  RowSubset CompactRows(const at::Tensor& target, int64_t ignore_index,
                        const UpstreamGradients& upstream, IdRange ids, Wait wait) const override {
    const UpstreamArrays gradients(upstream);
    if (!gradients.AreFp32On(target.device())) {
      return DeviceOps::CompactRows(target, ignore_index, upstream, ids, wait);
    }
    const c10::cuda::CUDAGuard on_device(target.device());
    const auto compaction =
        std::make_shared<CudaCompaction>(target.contiguous(), ignore_index, gradients, ids, wait);
    return wait == Wait::kLater ? RowSubset{.pending = compaction} : compaction->Result();
  }

  at::Tensor SumLoss(const LinearLogprobOutputs& scores,
                     const UpstreamGradients& coefficients) const override {
    const at::Tensor& any = scores.logprob;
    const UpstreamArrays arrays(coefficients);
    if (any.scalar_type() != at::kFloat || !arrays.AreFp32On(any.device())) {
      return DeviceOps::SumLoss(scores, coefficients);
    }
    const c10::cuda::CUDAGuard on_device(any.device());
    kernels::RowLossParams params;
    params.num_rows = any.size(0);
    std::array<at::Tensor, kLossScores.size()> values;
    for (size_t i = 0; i < values.size(); ++i) {
      const at::Tensor& given = scores.*kLossScores[i].output;
      if (given.defined()) values[i] = given.contiguous();
      if (given.defined() && given.scalar_type() != at::kFloat) {
        return DeviceOps::SumLoss(scores, coefficients);
      }
      params.scores[i] = {Floats(values[i]), arrays.Of(kLossScores[i].upstream)};
    }
    at::Tensor loss = at::empty({}, any.options());
    params.loss = loss.mutable_data_ptr<float>();
    CheckLaunch(LaunchRowLoss(params, c10::cuda::getCurrentCUDAStream()), "the loss");
    return loss;
  }

  void MultiplyRows(const at::Tensor& rows, const at::Tensor& factors,
                    at::Tensor& products) const override {
    const auto dtype = KernelDtype(rows.scalar_type());
    if (!dtype.has_value() || factors.scalar_type() != at::kFloat || !factors.is_contiguous() ||
        !products.is_contiguous() || !IsVectorAligned(rows) || !IsVectorAligned(products)) {
      return DeviceOps::MultiplyRows(rows, factors, products);
    }
    const c10::cuda::CUDAGuard on_device(rows.device());
    kernels::CopyRowsParams params = CopyParams(rows, products);
    params.factors = factors.const_data_ptr<float>();
    params.dtype = *dtype;
    CheckLaunch(LaunchCopyRows(params, c10::cuda::getCurrentCUDAStream()),
                "the multiplication of rows by factors");
  }

  void Scale(at::Tensor& gradient, const at::Tensor& factor) const override {
    const auto dtype = KernelDtype(gradient.scalar_type());
    if (!dtype.has_value() || !gradient.is_contiguous() || factor.device() != gradient.device() ||
        factor.scalar_type() != at::kFloat || !IsAddressAligned(gradient)) {
      return DeviceOps::Scale(gradient, factor);
    }
    const c10::cuda::CUDAGuard on_device(gradient.device());
    CheckLaunch(kernels::LaunchScaleUnlessOne(gradient.mutable_data_ptr(), *dtype, gradient.numel(),
                                              factor.const_data_ptr<float>(),
                                              c10::cuda::getCurrentCUDAStream()),
                "the scaling of a gradient");
  }
};

}  // namespace

const DeviceOps& CudaDeviceOps() {
  static const CudaOps ops;
  return ops;
}

}  // namespace logprobd::torch_ops
