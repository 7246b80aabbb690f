#include "server/engine/cuda_head.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "kernels/common/tile.h"
#include "server/base/errors.h"
#include "server/engine/cuda_status.h"

namespace logprobd {
namespace {

constexpr int64_t kReadBytes = int64_t{8} << 20;

/// One of the two buffers that a load alternates between.
struct ReadBuffer {
  PinnedBuffer memory;
  CudaEvent copied;
};

}  // namespace

int64_t CudaHeadBytes(const kernels::ChunkPlan& plan, bool has_bias) {
  const int64_t columns = plan.num_tiles * kernels::kTileColumns;
  return plan.weight_bytes() + (has_bias ? columns * int64_t{sizeof(float)} : 0);
}

absl::StatusOr<CudaHead> LoadCudaHead(
    const HeadWeights& weights, const kernels::ChunkPlan& plan,
    const std::function<void(int64_t done_bytes, int64_t total_bytes)>& progress) {
  const HeadInfo& info = weights.info();
  const int64_t pitch = plan.padded_hidden * kernels::DtypeBytes(plan.head_dtype);
  const int64_t buffer_rows = std::clamp(kReadBytes / pitch, int64_t{1}, info.vocab_size);
  CudaHead head;
  head.transform = {.scale = info.scale, .softcap = info.softcap};
  LOGPROBD_ASSIGN_OR_RETURN(head.weight, AllocateDevice(plan.weight_bytes(), "the head's weight"));
  LOGPROBD_ASSIGN_OR_RETURN(CudaStream stream, CreateStream());
  // The rows' padding is zero from the start and ReadRows leaves it alone.
  std::array<ReadBuffer, 2> buffers;
  for (ReadBuffer& buffer : buffers) {
    LOGPROBD_ASSIGN_OR_RETURN(buffer.memory,
                              AllocatePinned(buffer_rows * pitch, "reading the head's weight"));
    LOGPROBD_ASSIGN_OR_RETURN(buffer.copied, CreateEvent());
  }
  const int64_t total_bytes = info.vocab_size * info.hidden_size * DtypeBytes(info.dtype);
  size_t turn = 0;
  absl::Status status;
  for (int64_t row = 0; row < info.vocab_size && status.ok(); row += buffer_rows) {
    const int64_t row_end = std::min(row + buffer_rows, info.vocab_size);
    ReadBuffer& buffer = buffers[turn];
    turn = 1 - turn;
    status = [&]() -> absl::Status {
      LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(buffer.copied.get()));
      LOGPROBD_RETURN_IF_ERROR(weights.ReadRows(row, row_end, buffer.memory.get(), pitch));
      LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(
          head.weight.get() + row * pitch, buffer.memory.get(),
          static_cast<size_t>((row_end - row) * pitch), cudaMemcpyHostToDevice, stream.get()));
      LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(buffer.copied.get(), stream.get()));
      if (progress) progress(row_end * total_bytes / info.vocab_size, total_bytes);
      return absl::OkStatus();
    }();
  }
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream.get()));
  LOGPROBD_RETURN_IF_ERROR(status);
  if (!weights.bias().empty()) {
    const int64_t columns = plan.num_tiles * kernels::kTileColumns;
    LOGPROBD_ASSIGN_OR_RETURN(head.bias,
                              AllocateDevice(columns * int64_t{sizeof(float)}, "the head's bias"));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpy(head.bias.get(), weights.bias().data(),
                                             static_cast<size_t>(info.vocab_size) * sizeof(float),
                                             cudaMemcpyHostToDevice));
  }
  return head;
}

}  // namespace logprobd
