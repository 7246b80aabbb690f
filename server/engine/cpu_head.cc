#include "server/engine/cpu_head.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/common/tile.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/thread_pool.h"
#include "server/base/errors.h"
#include "server/engine/kernel_params.h"

namespace logprobd {
namespace {

using kernels::kTileColumns;

/// Upper bound on the size of the read buffers of all threads together. Each buffer holds the rows
/// of one tile as stored. There is always at least one buffer, even if it exceeds the bound.
constexpr int64_t kReadBytesMax = int64_t{32} << 20;

}  // namespace

absl::StatusOr<HostMemory> HostMemory::Allocate(int64_t size_bytes) {
  HostMemory memory;
  memory.size_bytes_ = std::max<int64_t>(size_bytes, 1);
  void* mapped = mmap(nullptr, static_cast<size_t>(memory.size_bytes_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat(
        size_bytes, " bytes of host memory cannot be allocated: ", std::strerror(errno)));
  }
  memory.data_ = static_cast<std::byte*>(mapped);
  // If the system refuses huge pages, ordinary pages work as well.
  madvise(mapped, static_cast<size_t>(memory.size_bytes_), MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
  // Populates the pages now, so that the server runs out of memory at start and not under load. Old
  // kernels do not support the call and populate pages at their first use.
  if (madvise(mapped, static_cast<size_t>(memory.size_bytes_), MADV_POPULATE_WRITE) != 0 &&
      errno != EINVAL) {
    return absl::ResourceExhaustedError(absl::StrCat(
        size_bytes, " bytes of host memory cannot be allocated: ", std::strerror(errno)));
  }
#endif
  return memory;
}

HostMemory::~HostMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_bytes_));
}

kernels::CpuHead CpuHead::Describe(const HeadInfo& info, const TileRange& tiles) {
  kernels::CpuHead head;
  head.dtype = KernelDtype(info.dtype);
  head.hidden_size = info.hidden_size;
  head.vocab_size = info.vocab_size;
  head.tile_begin = tiles.begin;
  head.tile_end = tiles.end;
  head.transform = {.scale = info.scale, .softcap = info.softcap};
  return head;
}

kernels::CpuHead CpuHead::view() const {
  kernels::CpuHead head = Describe(info_, tiles_);
  head.packed_weight = weight_.data();
  head.bias = bias_.empty() ? nullptr : bias_.data();
  return head;
}

int64_t CpuHead::WeightBytes(const HeadInfo& info, const TileRange& tiles) {
  return tiles.size() * kernels::PackedTileBytes(KernelDtype(info.dtype), info.hidden_size) +
         (info.has_bias ? kernels::NumTiles(info.vocab_size) * kTileColumns * 4 : 0);
}

absl::StatusOr<CpuHead> CpuHead::Load(const HeadWeights& weights, const TileRange& tiles,
                                      int32_t num_threads, LoadMeter& meter) {
  CpuHead head;
  head.info_ = weights.info();
  head.tiles_ = tiles;
  const HeadInfo& info = head.info_;
  const kernels::Dtype dtype = KernelDtype(info.dtype);
  const int64_t tile_bytes = kernels::PackedTileBytes(dtype, info.hidden_size);
  LOGPROBD_ASSIGN_OR_RETURN(head.weight_, HostMemory::Allocate(tiles.size() * tile_bytes));

  const int64_t row_bytes = info.hidden_size * DtypeBytes(info.dtype);
  const int64_t read_bytes = kTileColumns * row_bytes;
  const int64_t num_readers = std::clamp<int64_t>(kReadBytesMax / read_bytes, 1, num_threads);
  LOGPROBD_ASSIGN_OR_RETURN(const HostMemory rows, HostMemory::Allocate(num_readers * read_bytes));

  kernels::ThreadPool readers(static_cast<int32_t>(num_readers));
  readers.ForEach(tiles.size(), [&](int64_t tile, int32_t worker) {
    if (meter.has_failed()) return;
    const int64_t begin = (tiles.begin + tile) * kTileColumns;
    const int64_t end = std::min<int64_t>(begin + kTileColumns, info.vocab_size);
    std::byte* tile_rows = rows.data() + worker * read_bytes;
    const absl::Status read = weights.ReadRows(begin, end, tile_rows, row_bytes);
    if (!read.ok()) {
      meter.Fail(read);
      return;
    }
    kernels::PackTile(dtype, {tile_rows, info.hidden_size}, end - begin, info.hidden_size,
                      head.weight_.data() + tile * tile_bytes);
    meter.Add((end - begin) * row_bytes);
  });
  LOGPROBD_RETURN_IF_ERROR(meter.status());

  if (!weights.bias().empty()) {
    head.bias_.assign(static_cast<size_t>(kernels::NumTiles(info.vocab_size) * kTileColumns), 0.0F);
    std::copy_n(weights.bias().begin(), info.vocab_size, head.bias_.begin());
  }
  return head;
}

}  // namespace logprobd
