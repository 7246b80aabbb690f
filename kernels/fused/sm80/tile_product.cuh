#pragma once

// TileProduct: the dot products of a block of hidden rows with the 192 columns of a tile.
//
// Idea      cp.async fills a ring of stages, ldmatrix loads fragments and mma.sync multiplies them.
//           A warp multiplies 32 rows by half of the columns, because a warp that multiplied 16
//           rows by all columns would read 1.6 times as many bytes of shared memory, more than an
//           A100 provides. Afterwards, pairs of warps exchange halves, so that a lane holds the
//           columns of a row that a lane of wgmma holds.
// Work      Two warps per 32 rows. A step covers 32 elements of the hidden dimension; the fragments
//           of 16 elements are loaded while the previous ones are multiplied.
// Traffic   A step reads 12 KiB of weight and 64 bytes per row; the exchange moves 384 bytes per row
//           through shared memory once.
// Numerics  fp32 sums. Products are added 16 elements at a time in ascending order, split by split,
//           as in the Hopper kernels; elements beyond the hidden size are zero. How an instruction
//           rounds depends on the GPU: the tensor cores of compute capability 8 add the two halves
//           of 16 elements one after the other. On 9.0 the sums have the bits of wgmma.
// Limits    See LaunchFusedPartials. At most 80 KiB of shared memory, which every GPU provides.
// Source    Our own; PTX defines the layout of fragments (mma.m16n8k16, ldmatrix).

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/tensor_core.cuh"
#include "kernels/common/tile.h"
#include "kernels/common/tile_sums.cuh"
#include "kernels/fused/params.h"

namespace logprobd::kernels::internal {

/// Operands as the device reads them. The weight starts with the launch's first column.
struct ProductOperands {
  const std::byte* hidden;
  int64_t hidden_pitch;  // bytes from one hidden row to the next
  const std::byte* weight;
  int64_t weight_pitch;    // bytes from one weight row to the next
  int32_t weight_columns;  // columns from the weight's first to the end of the vocabulary
  int32_t hidden_size;
  int32_t num_splits;
};

/// Returns the operands of checked parameters.
inline ProductOperands ProductOperandsOf(const FusedPartialsParams& params) {
  return {static_cast<const std::byte*>(params.hidden),
          params.hidden_stride * 2,
          static_cast<const std::byte*>(params.weight),
          params.weight_stride * 2,
          static_cast<int32_t>(params.vocab_size - params.tile_begin * kTileColumns),
          static_cast<int32_t>(params.hidden_size),
          params.num_splits};
}

template <int kBlockRows, Dtype kDtype>
class TileProduct {
 public:
  static constexpr int kRows = kBlockRows;
  static constexpr int kWarpRows = 32;
  static constexpr int kThreads = kRows / kWarpRows * 2 * 32;
  /// Blocks of a multiprocessor, as many as its registers allow.
  static constexpr int kSmBlocks = 256 / kThreads;

 private:
  static constexpr int kStep = 32;  // elements along the hidden dimension
  static constexpr int kChunkBytes = 16;
  static constexpr int kRowBytes = kStep * 2;
  static constexpr int kRowChunks = kRowBytes / kChunkBytes;
  static constexpr int kHiddenBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kHiddenBytes + kTileColumns * kRowBytes;
  /// Several blocks share the memory of a multiprocessor, so a small block has fewer stages.
  static constexpr int kStages = kSmBlocks == 1 ? 4 : 3;
  static constexpr int kAhead = kStages - 1;  // steps whose copies are in flight
  /// A thread copies one chunk of every kCopyRows-th row.
  static constexpr int kCopyRows = kThreads / kRowChunks;
  static constexpr int kHiddenCopies = kRows / kCopyRows;
  static constexpr int kWeightCopies = kTileColumns / kCopyRows;
  static_assert(kRows % kCopyRows == 0 && kTileColumns % kCopyRows == 0 && kCopyRows % 8 == 0);
  /// Sums of half a row of a tile: 8-column groups that a lane shares with its quad.
  static constexpr int kHalfGroups = kTileColumns / kTileChains / 2;
  static constexpr int kHalfColumns = kTileColumns / 2;

 public:
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes >= kThreads * kHalfGroups * 16, "the exchange uses the stages");

  /// A lane's sums. While products are added, dots[m] belongs to rows 16 m of the warp's 32 and to
  /// the warp's half of the columns. After Exchange, dots[m] belongs to half m of the columns and
  /// to the 16 rows that start with row() of the block.
  float dots[2][kHalfGroups][4] = {};

  /// `shared` has kSharedBytes, aligned to 128 bytes.
  __device__ __forceinline__ explicit TileProduct(std::byte* shared) : shared_(shared) {}

  /// First of the 16 rows of the block that the warp holds after Exchange.
  __device__ __forceinline__ int row() const { return warp_ / 2 * kWarpRows + column_half_ * 16; }

  /// Adds the products with the 192 columns from `first_column` of the weight on. `num_rows` is the
  /// number of the block's rows that exist, and row_at(i) returns row i of them in memory. The sums
  /// of other rows are unspecified. All threads of the block must call it.
  template <class RowAt>
  __device__ __forceinline__ void Multiply(const ProductOperands& operands, int32_t first_column,
                                           int32_t num_rows, const RowAt& row_at) {
    const int chunk = thread_ % kRowChunks;
    const int copy_row = thread_ / kRowChunks;
    const int32_t columns = operands.weight_columns - first_column;
    // Rows and columns that do not exist are replaced by the last ones, so that every address is
    // valid. Such rows are not copied, and the sums of such columns are not used.
    const std::byte* hidden_from[kHiddenCopies];
    const std::byte* weight_from[kWeightCopies];
#pragma unroll
    for (int i = 0; i < kHiddenCopies; ++i) {
      hidden_from[i] = row_at(min(copy_row + i * kCopyRows, num_rows - 1)) + chunk * kChunkBytes;
    }
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i) {
      const int32_t column = first_column + min(copy_row + i * kCopyRows, columns - 1);
      weight_from[i] = operands.weight + column * operands.weight_pitch + chunk * kChunkBytes;
    }
    const uint32_t stages = SharedAddress(shared_);
    const uint32_t copy_to = stages + Swizzled(copy_row, chunk);

    const int32_t weight_steps = (operands.hidden_size + kStep - 1) / kStep;
    const int32_t num_steps = weight_steps * operands.num_splits;
    const auto split_bytes = static_cast<int32_t>(SplitPitch(operands.hidden_size) * 2);
    int32_t steps_left = num_steps;  // steps whose copies have not started
    int32_t hidden_offset = 0;       // bytes from the row's start to the next step to copy
    int32_t weight_offset = 0;
    uint32_t write_stage = 0;  // bytes from the first stage
    const auto copy = [&] {
      if (steps_left > 0) {
        const uint32_t to = copy_to + write_stage;
        const int32_t bytes_left = operands.hidden_size * 2 - weight_offset;
        if (bytes_left >= kRowBytes) {
#pragma unroll
          for (int i = 0; i < kHiddenCopies; ++i) {
            if (copy_row + i * kCopyRows >= num_rows) continue;
            CopyChunk(to + i * kCopyRows * kRowBytes, hidden_from[i] + hidden_offset);
          }
#pragma unroll
          for (int i = 0; i < kWeightCopies; ++i) {
            CopyChunk(to + kHiddenBytes + i * kCopyRows * kRowBytes,
                      weight_from[i] + weight_offset);
          }
        } else {
          const int32_t bytes = min(max(bytes_left - chunk * kChunkBytes, 0), kChunkBytes);
          const int32_t back = bytes > 0 ? 0 : chunk * kChunkBytes;  // stays within the row
#pragma unroll
          for (int i = 0; i < kHiddenCopies; ++i) {
            if (copy_row + i * kCopyRows >= num_rows) continue;
            CopyPartOfChunk(to + i * kCopyRows * kRowBytes, hidden_from[i] + (hidden_offset - back),
                            bytes);
          }
#pragma unroll
          for (int i = 0; i < kWeightCopies; ++i) {
            CopyPartOfChunk(to + kHiddenBytes + i * kCopyRows * kRowBytes,
                            weight_from[i] + (weight_offset - back), bytes);
          }
        }
        --steps_left;
        hidden_offset += kRowBytes;
        weight_offset += kRowBytes;
        if (weight_offset == weight_steps * kRowBytes) {  // the next split starts
          hidden_offset += split_bytes - weight_offset;
          weight_offset = 0;
        }
        write_stage = NextStage(write_stage);
      }
      CommitCopies();  // also without copies, because WaitForCopies counts the groups
    };

    // Rows of A are hidden rows: lanes 0 to 15 pass the first chunk of 16 rows and lanes 16 to 31
    // the second one. Rows of B are columns of the weight: each group of 8 lanes passes one chunk
    // of 8.
    const int lane = thread_ % 32;
    const uint32_t hidden_at = stages + Swizzled(warp_ / 2 * kWarpRows + lane % 16, lane / 16);
    const uint32_t weight_at =
        stages + kHiddenBytes +
        Swizzled(column_half_ * kHalfColumns + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const bool multiplies = warp_ / 2 * kWarpRows < num_rows;  // uniform within a warp
    Fragments fragments[2];
    const auto load = [&](Fragments& to, uint32_t stage, int half) {
      // The halves of a step differ in bit 1 of the chunk, which the swizzle only inverts.
      const auto flip = static_cast<uint32_t>(half * 2 * kChunkBytes);
      if (multiplies) to.Load((hidden_at ^ flip) + stage, (weight_at ^ flip) + stage);
    };
    const auto multiply = [&](const Fragments& from) {
      if (multiplies) from.AddProductsTo(dots);
    };

#pragma unroll
    for (int step = 0; step < kAhead; ++step) copy();
    WaitForCopies<kAhead - 1>();
    __syncthreads();
    uint32_t read_stage = 0;
    load(fragments[0], read_stage, 0);
#pragma unroll 1
    for (int32_t step = 0; step < num_steps; ++step) {
      load(fragments[1], read_stage, 1);
      copy();  // into the stage of the previous step, which all warps have read
      multiply(fragments[0]);
      WaitForCopies<kAhead - 1>();
      __syncthreads();
      read_stage = NextStage(read_stage);
      load(fragments[0], read_stage, 0);  // after the last step unused, perhaps not even written
      multiply(fragments[1]);
    }
  }

  /// Exchanges halves between pairs of warps (see `dots`). All threads of the block must call it.
  __device__ __forceinline__ void Exchange() {
    WaitForCopies<0>();
    __syncthreads();  // all warps have read the stages
    if (column_half_ == 0) {
      Send(dots[1]);
    } else {
      Send(dots[0]);
    }
    __syncthreads();
    if (column_half_ == 0) {
      Receive(dots[1]);
    } else {
      Receive(dots[0]);
    }
  }

 private:
  /// Operands of 16 elements of the hidden dimension: 32 rows, and half of the columns.
  struct Fragments {
    uint32_t hidden[2][4];
    uint32_t weight[kHalfGroups / 2][4];

    __device__ __forceinline__ void Load(uint32_t hidden_at, uint32_t weight_at) {
#pragma unroll
      for (int m = 0; m < 2; ++m) LoadMatrices(hidden[m], hidden_at + m * 16 * kRowBytes);
#pragma unroll
      for (int j = 0; j < kHalfGroups / 2; ++j) {
        LoadMatrices(weight[j], weight_at + j * 16 * kRowBytes);
      }
    }

    __device__ __forceinline__ void AddProductsTo(float (&sums)[2][kHalfGroups][4]) const {
#pragma unroll
      for (int j = 0; j < kHalfGroups; ++j) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          AddProducts<kDtype>(sums[m][j], hidden[m], weight[j / 2][j % 2 * 2],
                              weight[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  };

  /// Returns the offset of a chunk of a row in its operand's part of a stage. Two rows of 64 bytes
  /// share the 128 bytes of all banks; eight consecutive rows have a chunk in different banks.
  static __device__ __forceinline__ uint32_t Swizzled(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (row / 2 % kRowChunks)) * kChunkBytes;
  }

  static __device__ __forceinline__ uint32_t NextStage(uint32_t stage) {
    return stage == kAhead * kStageBytes ? 0 : stage + kStageBytes;
  }

  /// Returns the element j of what a warp sends, for this lane.
  __device__ __forceinline__ float4& Sent(int warp, int j) const {
    return reinterpret_cast<float4*>(shared_)[(warp * kHalfGroups + j) * 32 + thread_ % 32];
  }

  __device__ __forceinline__ void Send(const float (&half)[kHalfGroups][4]) const {
#pragma unroll
    for (int j = 0; j < kHalfGroups; ++j) {
      Sent(warp_, j) = make_float4(half[j][0], half[j][1], half[j][2], half[j][3]);
    }
  }

  __device__ __forceinline__ void Receive(float (&half)[kHalfGroups][4]) const {
#pragma unroll
    for (int j = 0; j < kHalfGroups; ++j) {
      const float4 received = Sent(warp_ ^ 1, j);
      half[j][0] = received.x;
      half[j][1] = received.y;
      half[j][2] = received.z;
      half[j][3] = received.w;
    }
  }

  std::byte* const shared_;
  const int thread_ = static_cast<int>(threadIdx.x);
  const int warp_ = __shfl_sync(0xFFFFFFFFU, thread_ / 32, 0);  // uniform for the compiler too
  const int column_half_ = warp_ % 2;
};

}  // namespace logprobd::kernels::internal
