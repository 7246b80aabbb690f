// Dot products of bf16 rows with a bf16 weight by AMX.
//
// Idea      Operands are tile registers of 16 rows x 32 hidden elements and of 16 pairs x 16 columns;
//           four tile registers hold the sums of 32 x 32 (or, for up to 16 rows, 16 x 64) dot
//           products. The weight is used without conversion.
// Work      kBlockSteps * 32 hidden elements of two groups of columns stay in the first-level cache
//           while all row blocks are processed; the sums of the steps are then added to the dot
//           products.
// Traffic   Reads the weight tile once.
// Numerics  One step adds the products of 32 hidden elements in two chains of 16 and then adds these
//           to the sum, all in fp32. Blocks of steps have separate sums, because one chain of all
//           steps would round at the magnitude of the whole sum each time (1.5 times the error at
//           1,024 elements). The steps and their order are the same for every shape. Denormal
//           inputs and sums count as zero, as the instruction defines.
// Limits    CpuIsaRuns must have been called, because it requests the tile registers from the
//           operating system.
// Source    Our own.

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/tile_kernels.h"

namespace logprobd::kernels::internal {
namespace {

constexpr int kRowBlock = 16;
constexpr int64_t kStep = 32;       // hidden elements per instruction
constexpr int64_t kBlockSteps = 8;  // 8 * 32 elements x 32 columns of bf16: 16 KiB
static_assert(KChunk(Dtype::kBf16) % (kBlockSteps * kStep) == 0);
constexpr int64_t kHiddenTileElements = kRowBlock * kStep;
constexpr int64_t kWeightTileBytes = 1024;         // 16 pairs of 16 columns
constexpr int64_t kDotsStride = kTileColumns * 4;  // bytes
static_assert(kStep / 2 * kGroupColumns * 4 == kWeightTileBytes);

/// Weights of consecutive steps of all groups of columns; `weights` points to the first step of the
/// first group.
struct Weights {
  const char* weights;
  int64_t group_bytes;  // bytes from one group to the next
  const char* Group(int64_t column) const { return weights + column / kGroupColumns * group_bytes; }
};

constexpr int64_t Steps(int64_t hidden_size) { return (hidden_size + kStep - 1) / kStep; }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

/// Tells the compiler that the tile instructions below, whose accesses it cannot see, read
/// `memory`.
inline void MemoryIsReadBelow(const void* memory) {
  __asm__ volatile("" : : "r"(memory) : "memory");
}

using Line = float __attribute__((vector_size(64)));  // a row of a tile register

/// Sums of one block of steps, before they are added to the dot products.
template <int kRows, int kColumns>
struct BlockSums {
  alignas(64) float sums[kRows][kColumns];
  static constexpr int64_t kStride = kColumns * 4;  // bytes

  void AddTo(float* dots) const {
    MemoryIsReadBelow(sums);
    for (int row = 0; row < kRows; ++row) {
      for (int column = 0; column < kColumns; column += kGroupColumns) {
        float* to = dots + row * kTileColumns + column;
        Line before;
        Line block;
        __builtin_memcpy(&before, to, sizeof(before));
        __builtin_memcpy(&block, &sums[row][column], sizeof(block));
        before += block;
        __builtin_memcpy(to, &before, sizeof(before));
      }
    }
  }
};

/// Multiplies 32 rows by 32 columns over `num_steps` steps. The sums are added to the dot products,
/// or stored if `first`.
inline void Dots32x32(const uint16_t* hidden, int64_t hidden_block_elements, const char* left,
                      const char* right, int64_t num_steps, float* dots, bool first) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < num_steps; ++step) {
    const uint16_t* h = hidden + step * kHiddenTileElements;
    _tile_loadd(4, h, 64);
    _tile_loadd(6, left + step * kWeightTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + step * kWeightTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, h + hidden_block_elements, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  BlockSums<32, 32> block;
  float* to = first ? dots : &block.sums[0][0];
  const int64_t stride = first ? kDotsStride : block.kStride;
  float* lower = to + kRowBlock * stride / 4;
  _tile_stored(0, to, stride);
  _tile_stored(1, to + 16, stride);
  _tile_stored(2, lower, stride);
  _tile_stored(3, lower + 16, stride);
  if (!first) block.AddTo(dots);
}

/// Behaves like Dots32x32, for 16 rows and 64 columns.
inline void Dots16x64(const uint16_t* hidden, const char* weights, int64_t group_bytes,
                      int64_t num_steps, float* dots, bool first) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < num_steps; ++step) {
    const char* w = weights + step * kWeightTileBytes;
    _tile_loadd(4, hidden + step * kHiddenTileElements, 64);
    _tile_loadd(5, w, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, w + group_bytes, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, w + 2 * group_bytes, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, w + 3 * group_bytes, 64);
    _tile_dpbf16ps(3, 4, 5);
  }
  BlockSums<16, 64> block;
  float* to = first ? dots : &block.sums[0][0];
  const int64_t stride = first ? kDotsStride : block.kStride;
  _tile_stored(0, to, stride);
  _tile_stored(1, to + 16, stride);
  _tile_stored(2, to + 32, stride);
  _tile_stored(3, to + 48, stride);
  if (!first) block.AddTo(dots);
}

/// Multiplies all row blocks over `num_steps` steps. `hidden` points to the first of these steps in
/// the first block.
void DotsOfSteps(const TileDotsParams& params, const uint16_t* hidden, const Weights& weights,
                 int64_t num_steps, bool first) {
  const int64_t block_elements = Steps(params.hidden_size) * kHiddenTileElements;
  const int64_t num_blocks = (params.num_rows + kRowBlock - 1) / kRowBlock;
  const int64_t paired_blocks = num_blocks / 2 * 2;
  for (int64_t column = 0; column < kTileColumns; column += 32) {
    for (int64_t block = 0; block < paired_blocks; block += 2) {
      Dots32x32(hidden + block * block_elements, block_elements, weights.Group(column),
                weights.Group(column + 16), num_steps,
                params.dots + block * kRowBlock * kTileColumns + column, first);
    }
  }
  if (paired_blocks < num_blocks) {
    for (int64_t column = 0; column < kTileColumns; column += 64) {
      Dots16x64(hidden + paired_blocks * block_elements, weights.Group(column), weights.group_bytes,
                num_steps, params.dots + paired_blocks * kRowBlock * kTileColumns + column, first);
    }
  }
}

/// Copies the weights of an incomplete last step, padded with zeros: [groups, 16, 16] pairs.
void PadLastStep(const char* weights, int64_t group_bytes, int64_t rest_bytes, char* padded) {
  for (int64_t group = 0; group < kTileColumns / kGroupColumns; ++group) {
    char* to = padded + group * kWeightTileBytes;
    __builtin_memcpy(to, weights + group * group_bytes, static_cast<size_t>(rest_bytes));
    __builtin_memset(to + rest_bytes, 0, static_cast<size_t>(kWeightTileBytes - rest_bytes));
  }
  MemoryIsReadBelow(padded);
}

void TileDots(const TileDotsParams& params) {
  const TileConfig config;
  MemoryIsReadBelow(&config);
  _tile_loadconfig(&config);
  const auto* hidden =
      static_cast<const uint16_t*>(params.hidden) + params.k_begin / kStep * kHiddenTileElements;
  const auto* weights = static_cast<const char*>(params.weight_tile);
  const int64_t packed_hidden = PackedHidden(Dtype::kBf16, params.k_end - params.k_begin);
  const bool is_first = params.k_begin == 0;
  const int64_t group_bytes = packed_hidden * kGroupColumns * 2;
  const int64_t whole_steps = packed_hidden / kStep;
  for (int64_t step = 0; step < whole_steps; step += kBlockSteps) {
    const int64_t num_steps = whole_steps - step < kBlockSteps ? whole_steps - step : kBlockSteps;
    DotsOfSteps(params, hidden + step * kHiddenTileElements,
                {weights + step * kWeightTileBytes, group_bytes}, num_steps, is_first && step == 0);
  }
  if (whole_steps < Steps(packed_hidden)) {
    auto* padded = static_cast<char*>(params.scratch);
    PadLastStep(weights + whole_steps * kWeightTileBytes, group_bytes,
                group_bytes - whole_steps * kWeightTileBytes, padded);
    DotsOfSteps(params, hidden + whole_steps * kHiddenTileElements, {padded, kWeightTileBytes}, 1,
                is_first && whole_steps == 0);
  }
  _tile_release();
}

/// Packs rows as [blocks, steps, kRowBlock, kStep] of bf16; missing rows and elements are zero.
void PackRows(Dtype /*dtype: bf16*/, const void* hidden, int64_t num_rows, int64_t hidden_size,
              void* packed) {
  const auto* rows = static_cast<const uint16_t*>(hidden);
  const int64_t block_elements = Steps(hidden_size) * kHiddenTileElements;
  auto* block = static_cast<uint16_t*>(packed);
  for (int64_t row = 0; row < num_rows; row += kRowBlock, block += block_elements) {
    if (row + kRowBlock > num_rows || hidden_size % kStep != 0) {
      __builtin_memset(block, 0, static_cast<size_t>(block_elements) * sizeof(uint16_t));
    }
    for (int64_t r = 0; r < kRowBlock && row + r < num_rows; ++r) {
      const uint16_t* from = rows + (row + r) * hidden_size;
      for (int64_t k = 0; k < hidden_size; k += kStep) {
        const int64_t count = hidden_size - k < kStep ? hidden_size - k : kStep;
        __builtin_memcpy(block + k * kRowBlock + r * kStep, from + k,
                         static_cast<size_t>(count) * sizeof(uint16_t));
      }
    }
  }
}

int64_t PackedRowBytes(int64_t hidden_size) { return Steps(hidden_size) * kStep * 2; }

}  // namespace

const DotKernel& AmxBf16Dots() {
  static constexpr DotKernel kKernel = {kRowBlock, PackedRowBytes, PackRows, TileDots};
  return kKernel;
}

}  // namespace logprobd::kernels::internal
