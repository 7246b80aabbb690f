// ListedLogitsKernel: computes the logits of listed (row, id) pairs.
//
// Idea      The dot products of eight pairs are the diagonal of one small matrix product. The other
//           56 sums, and half of the instruction's rows, are discarded: reading the weight's rows
//           dominates the time.
// Work      One warp per eight pairs steps along their rows by 128 bytes, through a ring of stages
//           in shared memory, and reads whole lines of the cache.
// Traffic   Reads one weight row and one hidden row per pair; the hidden row comes from a cache
//           when pairs of the same row are adjacent.
// Numerics  mma.sync adds 16 products at a time to an fp32 sum, as wgmma does on Hopper; a test
//           requires the same bits. Other GPUs may add fewer products at a time, so each element
//           has the place that it has in kernels/fused/sm80.
// Limits    2^31 - 1 pairs per launch.
// Source    Our own; PTX defines the layout of fragments (mma.m16n8k16).

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/tensor_core.cuh"
#include "kernels/common/tile_sums.cuh"
#include "kernels/fused/checks.h"
#include "kernels/fused/choice.h"
#include "kernels/fused/launch.h"
#include "kernels/fused/listed_logits.h"

namespace logprobd::kernels {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kBlockWarps = 4;
constexpr int kBlockThreads = kBlockWarps * kWarpThreads;
constexpr int kSmBlocks = 4;
constexpr int kWarpPairs = 8;
constexpr int kBlockPairs = kBlockWarps * kWarpPairs;

constexpr int kChunkBytes = 16;  // bytes of one asynchronous copy
constexpr int kRowChunks = 8;    // chunks of a row per stage
constexpr int kRowBytes = kRowChunks * kChunkBytes;
constexpr int kStepBytes = 32;                         // bytes of a row per instruction
constexpr int kOperandBytes = kWarpPairs * kRowBytes;  // of one operand per stage
constexpr int kStages = 6;
constexpr int kWarpBytes = kStages * 2 * kOperandBytes;  // the hidden rows, then the weight's

/// Returns the offset of a chunk of a row in a stage. The chunks of a row change places with the
/// row, so that the same chunk of eight rows lies in different banks.
__device__ __forceinline__ uint32_t OffsetOf(int row, int chunk) {
  return row * kRowBytes + (chunk ^ row) * kChunkBytes;
}

/// A pair whose row and id the operands contain, or none.
struct Pair {
  int64_t row = 0;
  int64_t id = 0;
  bool exists = false;
};

__device__ __forceinline__ Pair PairAt(const ListedLogitsParams& params, int64_t i) {
  if (i >= params.count) return {};
  const FusedPartialsParams& partials = params.partials;
  Pair pair;
  pair.row = params.rows == nullptr ? i : static_cast<int64_t>(params.rows[i]) - params.row_begin;
  pair.id = params.ids[i];
  pair.exists = pair.row >= 0 && pair.row < partials.num_rows &&
                pair.id >= partials.tile_begin * kTileColumns &&
                pair.id < partials.tile_end * kTileColumns && pair.id < partials.vocab_size;
  return pair;
}

/// Copies the rows of a warp's pairs to its stages. A lane copies one chunk of every fourth row.
class RowCopies {
 public:
  __device__ RowCopies(const ListedLogitsParams& params, int64_t first_pair, uint32_t stages)
      : stages_(stages),
        row_bytes_(params.partials.hidden_size * 2),
        split_bytes_(SplitPitch(params.partials.hidden_size) * 2) {
    const FusedPartialsParams& partials = params.partials;
    for (int i = 0; i < kLaneRows; ++i) {
      const Pair pair = PairAt(params, first_pair + Row(i));
      exists_[i] = pair.exists;
      const int64_t column = pair.exists ? pair.id - partials.tile_begin * kTileColumns : 0;
      const int64_t row = pair.exists ? pair.row : 0;
      weight_[i] =
          static_cast<const std::byte*>(partials.weight) + column * partials.weight_stride * 2;
      hidden_[i] =
          static_cast<const std::byte*>(partials.hidden) + row * partials.hidden_stride * 2;
    }
  }

  /// Copies the next 128 bytes of each row to a stage; the end of a split is filled with zeros.
  __device__ __forceinline__ void CopyNext(int stage) {
    const int64_t begin = position_ + Chunk() * kChunkBytes;
    const auto left = static_cast<int32_t>(
        min(max(row_bytes_ - begin, int64_t{0}), static_cast<int64_t>(kChunkBytes)));
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const uint32_t to = stages_ + stage * 2 * kOperandBytes + OffsetOf(Row(i), Chunk());
      const int32_t bytes = exists_[i] ? left : 0;
      CopyPartOfChunk(to, bytes > 0 ? hidden_[i] + begin : hidden_[i], bytes);
      CopyPartOfChunk(to + kOperandBytes, bytes > 0 ? weight_[i] + begin : weight_[i], bytes);
    }
    position_ += kRowBytes;
    if (position_ < row_bytes_) return;
    position_ = 0;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) hidden_[i] += split_bytes_;
  }

 private:
  static constexpr int kLaneRows = kWarpPairs * kRowChunks / kWarpThreads;

  static __device__ __forceinline__ int Chunk() {
    return static_cast<int>(threadIdx.x) % kRowChunks;
  }
  static __device__ __forceinline__ int Row(int i) {
    return static_cast<int>(threadIdx.x) % kWarpThreads / kRowChunks +
           i * (kWarpThreads / kRowChunks);
  }

  const uint32_t stages_;
  const int64_t row_bytes_;
  const int64_t split_bytes_;
  int64_t position_ = 0;  // in the rows
  const std::byte* hidden_[kLaneRows];
  const std::byte* weight_[kLaneRows];
  bool exists_[kLaneRows];
};

template <Dtype kDtype>
__global__ void __launch_bounds__(kBlockThreads, kSmBlocks)
    ListedLogitsKernel(const ListedLogitsParams params) {
  __shared__ __align__(128) std::byte shared[kBlockWarps * kWarpBytes];
  const FusedPartialsParams& partials = params.partials;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int64_t first_pair = static_cast<int64_t>(blockIdx.x) * kBlockPairs + warp * kWarpPairs;
  const int quad = lane / 4;
  const Pair pair = PairAt(params, first_pair + quad);
  if (!__any_sync(0xFFFFFFFFU, pair.exists)) return;

  const uint32_t stages = SharedAddress(shared) + warp * kWarpBytes;
  RowCopies copies(params, first_pair, stages);
  const int64_t split_stages = (partials.hidden_size * 2 + kRowBytes - 1) / kRowBytes;
  const int64_t num_stages = partials.num_splits * split_stages;
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < num_stages) copies.CopyNext(i);
    CommitCopies();  // also without copies, because WaitForCopies counts the groups
  }
  // A lane passes row lane % 8 of two chunks of both operands to LoadMatrices, as sm80 does.
  const int row = lane % kWarpPairs;
  const uint32_t operand = stages + lane / 16 * kOperandBytes;
  float sums[4] = {0, 0, 0, 0};
  int stage = 0;
  for (int64_t i = 0; i < num_stages; ++i) {
    WaitForCopies<kStages - 2>();
    __syncwarp();  // The copies of all lanes are complete, and the stage before is free.
    if (i + kStages - 1 < num_stages) copies.CopyNext(stage == 0 ? kStages - 1 : stage - 1);
    CommitCopies();
#pragma unroll
    for (int step = 0; step < kRowBytes / kStepBytes; ++step) {
      uint32_t parts[4];
      LoadMatrices(parts, operand + stage * 2 * kOperandBytes +
                              OffsetOf(row, step * 2 + lane / kWarpPairs % 2));
      const uint32_t rows[4] = {parts[0], 0, parts[1], 0};
      AddProducts<kDtype>(sums, rows, parts[2], parts[3]);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  // The sum of pair p is element p of row p of the product.
  if (lane % 4 != quad / 2 || !pair.exists) return;
  const float bias = partials.bias == nullptr ? 0.0F : partials.bias[pair.id];
  params.logits[first_pair + quad] =
      LogitOf(quad % 2 == 0 ? sums[0] : sums[1], bias, partials.transform);
}

template <Dtype kDtype>
cudaError_t LaunchOf(const ListedLogitsParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<uint32_t>((params.count + kBlockPairs - 1) / kBlockPairs);
  ListedLogitsKernel<kDtype><<<blocks, kBlockThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchListedLogits(const ListedLogitsParams& params, cudaStream_t stream) {
  if (params.count < 0 || params.count > INT32_MAX) return cudaErrorInvalidValue;
  if (params.count == 0 || params.partials.num_rows == 0) return cudaSuccess;
  if (!internal::HasValidOperands(params.partials) || params.partials.row_count != nullptr ||
      params.ids == nullptr || params.logits == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (FusedArchOfCurrentDevice() == FusedArch::kNone) return cudaErrorNotSupported;
  return params.partials.dtype == Dtype::kBf16 ? LaunchOf<Dtype::kBf16>(params, stream)
                                               : LaunchOf<Dtype::kF16>(params, stream);
}

}  // namespace logprobd::kernels
