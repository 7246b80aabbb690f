#include "server/engine/cuda_slot.h"

#include <algorithm>
#include <cstring>

#include "kernels/common/logit_scale.h"
#include "server/base/errors.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/kernel_params.h"

namespace logprobd {
namespace {

template <typename T>
void CopyTo(absl::Span<T> out, const T* in, int64_t count) {
  LOGPROBD_CHECK(static_cast<int64_t>(out.size()) >= count, out.size(), " < ", count);
  if (count > 0) std::memcpy(out.data(), in, static_cast<size_t>(count) * sizeof(T));
}

/// Returns true if some row has an entropy temperature that differs from its temperature.
bool NeedsEntropyScales(const ScoreBatch& batch) {
  return batch.outputs.Has(Output::kEntropy) && !batch.entropy_temperatures.empty() &&
         !std::equal(batch.temperatures.begin(), batch.temperatures.end(),
                     batch.entropy_temperatures.begin(), batch.entropy_temperatures.end());
}

int64_t BlocksMax(const WorkspacePlan& plan) {
  int64_t least_rows = plan.batch_rows_max;
  for (const auto dtype : {kernels::Dtype::kBf16, kernels::Dtype::kF16, kernels::Dtype::kF32}) {
    least_rows = std::min(least_rows, plan.BlockRows(dtype));
    if (plan.with_fused) {
      least_rows = std::min(least_rows, plan.FusedRows(dtype, 2, plan.top_k_max));
    }
  }
  return (plan.batch_rows_max + least_rows - 1) / least_rows;
}

}  // namespace

absl::StatusOr<std::shared_ptr<PinnedBuffer>> CudaSlot::CreateHostSide(const WorkspacePlan& plan) {
  LOGPROBD_ASSIGN_OR_RETURN(PinnedBuffer host, AllocatePinned(plan.slot_bytes, "a batch's scores"));
  return std::make_shared<PinnedBuffer>(std::move(host));
}

absl::StatusOr<CudaSlot> CudaSlot::Create(const WorkspacePlan& plan,
                                          std::shared_ptr<PinnedBuffer> host) {
  CudaSlot slot;
  slot.host_ = std::move(host);
  slot.candidates_per_pass_ = plan.candidates_per_pass;
  LOGPROBD_ASSIGN_OR_RETURN(slot.device_, AllocateDevice(plan.slot_bytes, "a batch's scores"));
  slot.blocks_.resize(static_cast<size_t>(BlocksMax(plan)));
  for (BlockEvents& block : slot.blocks_) {
    for (CudaEvent* event : {&block.copy_begin, &block.gather_begin, &block.copy_end,
                             &block.kernel_begin, &block.kernel_end, &block.combine_end}) {
      LOGPROBD_ASSIGN_OR_RETURN(*event, CreateEvent());
    }
  }
  LOGPROBD_ASSIGN_OR_RETURN(slot.output_begin_, CreateEvent());
  LOGPROBD_ASSIGN_OR_RETURN(slot.output_end_, CreateEvent());
  return slot;
}

int64_t CudaSlot::NumPasses(const ScoreBatch& batch) const {
  const auto count = static_cast<int64_t>(batch.candidate_ids.size());
  return std::max<int64_t>(1, (count + candidates_per_pass_ - 1) / candidates_per_pass_);
}

void CudaSlot::Prepare(const ScoreBatch& batch, int64_t pass) {
  pass_ = pass;
  num_rows_ = batch.num_rows;
  candidate_begin_ = pass * candidates_per_pass_;
  num_candidates_ = std::min(static_cast<int64_t>(batch.candidate_ids.size()) - candidate_begin_,
                             candidates_per_pass_);
  const absl::Span<const int32_t> rows = batch.candidate_rows.subspan(
      static_cast<size_t>(candidate_begin_), static_cast<size_t>(num_candidates_));
  row_begin_ = pass == 0 ? 0 : rows.front();
  row_end_ = pass == 0 ? num_rows_ : rows.back() + 1;
  top_k_ = pass == 0 ? batch.top_k : 0;
  pass_outputs_ = pass == 0 ? batch.outputs : OutputSet();
  has_entropy_scales_ = pass == 0 && NeedsEntropyScales(batch);

  candidate_rows_ = 3 * num_rows_ * kWordBytes;
  candidate_ids_ = candidate_rows_ + num_candidates_ * kWordBytes;
  outputs_ = candidate_ids_ + num_candidates_ * kWordBytes;
  top_k_ids_ = outputs_ + kRowScoreBytes * num_rows_;
  top_k_logprobs_ = top_k_ids_ + num_rows_ * top_k_ * kWordBytes;
  candidate_logprobs_ = top_k_logprobs_ + num_rows_ * top_k_ * kWordBytes;
  end_ = candidate_logprobs_ + num_candidates_ * kWordBytes;
}

void CudaSlot::FillHost(const ScoreBatch& batch, double correction) {
  const absl::Span<const int32_t> rows = batch.candidate_rows.subspan(
      static_cast<size_t>(candidate_begin_), static_cast<size_t>(num_candidates_));
  const absl::Span<const int32_t> ids = batch.candidate_ids.subspan(
      static_cast<size_t>(candidate_begin_), static_cast<size_t>(num_candidates_));
  std::memcpy(host<int32_t>(0), batch.targets.data(), static_cast<size_t>(num_rows_ * kWordBytes));
  const auto scale_of = [correction](float temperature) {
    return kernels::CorrectedLog2Scale(temperature, correction);
  };
  std::transform(batch.temperatures.begin(), batch.temperatures.end(),
                 host<float>(num_rows_ * kWordBytes), scale_of);
  if (has_entropy_scales_) {
    std::transform(batch.entropy_temperatures.begin(), batch.entropy_temperatures.end(),
                   host<float>(2 * num_rows_ * kWordBytes), scale_of);
  }
  std::copy(rows.begin(), rows.end(), host<int32_t>(candidate_rows_));
  std::copy(ids.begin(), ids.end(), host<int32_t>(candidate_ids_));
}

absl::Status CudaSlot::EnqueueInputs(cudaStream_t stream) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(
      device_.get(), host_->get(), static_cast<size_t>(outputs_), cudaMemcpyHostToDevice, stream));
  return absl::OkStatus();
}

absl::Status CudaSlot::EnqueueOutputs(cudaStream_t stream) {
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_->get() + outputs_, device_.get() + outputs_,
                                                static_cast<size_t>(end_ - outputs_),
                                                cudaMemcpyDeviceToHost, stream));
  return absl::OkStatus();
}

template <typename Visit>
void CudaSlot::ForEachScoredColumn(const Visit& visit) const {
  int64_t offset = outputs_;
  ForEachRowColumn([&](const auto& column) {
    if (column.IsScored(pass_outputs_)) visit(column, offset);
    offset += column.kElementBytes * num_rows_;
  });
}

CudaBlock CudaSlot::Block(int64_t row_begin, int64_t num_rows) const {
  CudaBlock block;
  block.num_rows = num_rows;
  block.row_begin = row_begin;
  block.targets = device<int32_t>(0) + row_begin;
  block.log2_scales = device<float>(num_rows_ * kWordBytes) + row_begin;
  if (has_entropy_scales_) {
    block.entropy_log2_scales = device<float>(2 * num_rows_ * kWordBytes) + row_begin;
  }
  block.scores.nonfinite = device<uint8_t>(nonfinite()) + row_begin;
  ForEachScoredColumn([&]<typename T>(const OutputColumn<T>& column, int64_t offset) {
    SetRowScore(block.scores, column, device<T>(offset) + row_begin);
  });
  block.top_k = top_k_;
  block.top_k_ids = device<int32_t>(top_k_ids_) + row_begin * top_k_;
  block.top_k_logprobs = device<float>(top_k_logprobs_) + row_begin * top_k_;

  const int32_t* const rows = host<int32_t>(candidate_rows_);
  const int32_t* const rows_end = rows + num_candidates_;
  const int32_t* const first = std::lower_bound(rows, rows_end, row_begin);
  const int64_t skipped = first - rows;
  block.num_candidates = std::lower_bound(first, rows_end, row_begin + num_rows) - first;
  block.candidate_rows = device<int32_t>(candidate_rows_) + skipped;
  block.candidate_ids = device<int32_t>(candidate_ids_) + skipped;
  block.candidate_logprobs = device<float>(candidate_logprobs_) + skipped;
  return block;
}

void CudaSlot::CopyOut(ScoreBatch& batch) const {
  ForEachScoredColumn([&]<typename T>(const OutputColumn<T>& column, int64_t offset) {
    CopyTo(batch.*column.span, host<const T>(offset), num_rows_);
  });
  if (pass_ == 0) {
    CopyTo(batch.nonfinite, host<const uint8_t>(nonfinite()), num_rows_);
    CopyTo(batch.top_k_ids, host<const int32_t>(top_k_ids_), num_rows_ * top_k_);
    CopyTo(batch.top_k_logprobs, host<const float>(top_k_logprobs_), num_rows_ * top_k_);
  }
  if (num_candidates_ > 0) {
    CopyTo(batch.candidate_logprobs.subspan(static_cast<size_t>(candidate_begin_)),
           host<const float>(candidate_logprobs_), num_candidates_);
  }
}

}  // namespace logprobd
