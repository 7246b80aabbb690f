#include "server/engine/cuda_head.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "kernels/common/tile.h"
#include "kernels/cpu/thread_pool.h"
#include "server/base/errors.h"
#include "server/engine/cuda_resources.h"

namespace logprobd {
namespace {

constexpr int64_t kReadBytes = int64_t{4} << 20;

/// Number of reading threads per GPU. A thread copies about 6 GB/s from the page cache and a GPU
/// accepts 55 GB/s, but several GPUs load at the same time.
constexpr int32_t kReaders = 3;

/// The stream and the two buffers of a reading thread, which fills the buffers in turn.
struct Reader {
  struct Buffer {
    PinnedBuffer memory;
    CudaEvent copied;
  };
  std::array<Buffer, 2> buffers;
  CudaStream stream;
  size_t turn = 0;
};

absl::StatusOr<Reader> CreateReader(int64_t buffer_bytes) {
  Reader reader;
  LOGPROBD_ASSIGN_OR_RETURN(reader.stream, CreateStream());
  // The buffers are zero at the start, and ReadRows does not write the padding of the rows, so the
  // padding stays zero.
  for (Reader::Buffer& buffer : reader.buffers) {
    LOGPROBD_ASSIGN_OR_RETURN(buffer.memory,
                              AllocatePinned(buffer_bytes, "reading the head's weight"));
    LOGPROBD_ASSIGN_OR_RETURN(buffer.copied, CreateEvent());
  }
  return reader;
}

}  // namespace

int64_t CudaHeadBytes(const WorkspacePlan& plan, bool has_bias) {
  const int64_t columns = kernels::NumTiles(plan.vocab_size) * kernels::kTileColumns;
  return plan.weight_bytes() + (has_bias ? columns * int64_t{sizeof(float)} : 0);
}

absl::StatusOr<CudaHead> LoadCudaHead(const HeadWeights& weights, const WorkspacePlan& plan,
                                      LoadMeter& meter) {
  const HeadInfo& info = weights.info();
  const int64_t pitch = plan.padded_hidden * kernels::DtypeBytes(plan.head_dtype);
  const int64_t row_begin = plan.tile_begin * kernels::kTileColumns;
  const int64_t row_end =
      std::min((plan.tile_begin + plan.num_tiles) * kernels::kTileColumns, info.vocab_size);
  const int64_t buffer_rows = std::clamp(kReadBytes / pitch, int64_t{1}, row_end - row_begin);
  int gpu = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGetDevice(&gpu));
  CudaHead head;
  head.transform = {.scale = info.scale, .softcap = info.softcap};
  LOGPROBD_ASSIGN_OR_RETURN(head.weight, AllocateDevice(plan.weight_bytes(), "the head's weight"));
  std::vector<Reader> readers;
  for (int32_t i = 0; i < kReaders; ++i) {
    LOGPROBD_ASSIGN_OR_RETURN(Reader reader, CreateReader(buffer_rows * pitch));
    readers.push_back(std::move(reader));
  }
  const auto read = [&](int64_t piece, Reader& reader) -> absl::Status {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(gpu));
    const int64_t begin = row_begin + piece * buffer_rows;
    const int64_t end = std::min(begin + buffer_rows, row_end);
    Reader::Buffer& buffer = reader.buffers[reader.turn];
    reader.turn = 1 - reader.turn;
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(buffer.copied.get()));
    LOGPROBD_RETURN_IF_ERROR(weights.ReadRows(begin, end, buffer.memory.get(), pitch));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(
        head.weight.get() + (begin - row_begin) * pitch, buffer.memory.get(),
        static_cast<size_t>((end - begin) * pitch), cudaMemcpyHostToDevice, reader.stream.get()));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaEventRecord(buffer.copied.get(), reader.stream.get()));
    meter.Add((end - begin) * info.hidden_size * DtypeBytes(info.dtype));
    return absl::OkStatus();
  };
  kernels::ThreadPool threads(kReaders);
  threads.ForEach((row_end - row_begin + buffer_rows - 1) / buffer_rows,
                  [&](int64_t piece, int32_t thread) {
                    if (meter.has_failed()) return;
                    const absl::Status own = read(piece, readers[static_cast<size_t>(thread)]);
                    if (!own.ok()) meter.Fail(own);
                  });
  for (const Reader& reader : readers) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(reader.stream.get()));
  }
  LOGPROBD_RETURN_IF_ERROR(meter.status());
  if (!weights.bias().empty()) {
    const int64_t columns = kernels::NumTiles(info.vocab_size) * kernels::kTileColumns;
    LOGPROBD_ASSIGN_OR_RETURN(head.bias,
                              AllocateDevice(columns * int64_t{sizeof(float)}, "the head's bias"));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpy(head.bias.get(), weights.bias().data(),
                                             static_cast<size_t>(info.vocab_size) * sizeof(float),
                                             cudaMemcpyHostToDevice));
  }
  return head;
}

}  // namespace logprobd
