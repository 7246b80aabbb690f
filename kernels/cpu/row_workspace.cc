#include "kernels/cpu/row_workspace.h"

#include <algorithm>

#include "kernels/common/tile.h"
#include "kernels/cpu/combine_tiles.h"
#include "kernels/cpu/tile_kernels.h"

namespace logprobd::kernels {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

/// Maximum number of rows of a unit of work. Their tile of logits stays in the L2 cache.
constexpr int64_t kUnitRowsMax = 256;
/// Largest DotKernel::row_block.
constexpr int64_t kRowBlockMax = 16;

/// Maximum number of rows of a step. More rows per step would hardly make the passes over the
/// weight cheaper.
constexpr int64_t kRowsMax = 2048;

/// Maximum sizes of a workspace and of all of its per-thread parts together, in bytes.
constexpr int64_t kWorkspaceBytesMax = 48 * kMiB;
constexpr int64_t kThreadsBytesMax = 26 * kMiB;

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Returns the bytes per row of SharedRows: exponents at both temperatures, sums, extremes, top-k
/// lists.
int64_t SharedRowBytes(const RowScorer::Options& options) {
  if (options.num_shards == 1) return 0;
  return 2 * 4 + kSumFields * 8 + 8 + 4 + (1 + options.num_shards) * int64_t{options.top_k_max} * 8;
}

}  // namespace

WorkspaceSizes WorkspaceSizesOf(const CpuHead& head, const RowScorer::Options& options) {
  WorkspaceSizes sizes{};
  sizes.num_tiles =
      options.num_tiles_max > 0 ? options.num_tiles_max : head.tile_end - head.tile_begin;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    const DotKernel& dots = DotKernelFor(options.isa, dtype, head.dtype);
    sizes.packed_row_bytes =
        std::max(sizes.packed_row_bytes, dots.packed_row_bytes(head.hidden_size));
  }
  constexpr int64_t kUnitRowBytes =
      kTileColumns * sizeof(float) + sizeof(TileExtremes) + sizeof(int32_t);
  const int64_t fixed_bytes = kDotScratchBytes + (head.is_strided() ? kTileChunkBytes : 0);
  const int64_t thread_bytes_max = kThreadsBytesMax / options.num_threads;
  sizes.unit_rows = kUnitRowsMax;
  while (sizes.unit_rows > kRowBlockMax &&
         sizes.unit_rows * kUnitRowBytes + fixed_bytes > thread_bytes_max) {
    sizes.unit_rows /= 2;
  }
  const int64_t threads_bytes =
      options.num_threads * (sizes.unit_rows * kUnitRowBytes + fixed_bytes);
  // A row needs memory for its packed hidden states, two sets of sums, the extremes of every
  // thread, the scales, the target's logit and rank, and the candidate offset.
  const int64_t row_bytes = sizes.packed_row_bytes +
                            sizes.num_tiles * 2 * static_cast<int64_t>(sizeof(TileSums)) +
                            options.num_threads * static_cast<int64_t>(sizeof(TileExtremes)) + 24 +
                            TopRows::BytesOfRow(options.top_k_max) + SharedRowBytes(options);
  sizes.rows = std::min({(kWorkspaceBytesMax - threads_bytes) / row_bytes, kRowsMax,
                         RoundUp(options.batch_rows_max, kRowBlockMax)});
  // The number of rows is a multiple of unit_rows if it is at least unit_rows, and never less than
  // one row block.
  const int64_t multiple = sizes.rows >= sizes.unit_rows ? sizes.unit_rows : kRowBlockMax;
  sizes.rows = std::max(sizes.rows / multiple * multiple, kRowBlockMax);
  sizes.unit_rows = std::min(sizes.unit_rows, sizes.rows);
  sizes.bytes = threads_bytes + sizes.rows * row_bytes;
  return sizes;
}

}  // namespace logprobd::kernels
