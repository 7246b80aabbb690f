// Dot products of bf16 rows with a bf16 weight by AVX512-BF16.
//
// Idea      The same as fp32_dots_inl.h, except that the instruction multiplies pairs of bf16 values
//           and adds both products in fp32. Nothing is converted.
// Work      A block of kBlockPairs pairs of a group of columns is multiplied with all row blocks
//           before the next group of columns is read.
// Traffic   Reads the weight tile once.
// Numerics  Products are exact; each is added with one rounding. Denormal inputs and sums count as
//           zero, as the instruction defines. Each block of 128 hidden elements has a sum of its
//           own, which is then added to the dot product.
// Limits    Requires a CPU with AVX512-BF16.
// Source    Our own.

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/tile_kernels.h"

namespace logprobd::kernels::internal {
namespace {

constexpr int kRowBlock = 8;
constexpr int kLanes = 16;
static_assert(kLanes == kGroupColumns);
constexpr int64_t kBlockPairs = 64;
static_assert(KChunk(Dtype::kBf16) % (2 * kBlockPairs) == 0);

constexpr int64_t Pairs(int64_t hidden_size) { return (hidden_size + 1) / 2; }

/// Adds `num_pairs` pairs of products to kRows x (kVectors * kLanes) dot products, or sets them if
/// `first`. `hidden` is [num_pairs, kRowBlock] and `weights` is [kVectors, group_pairs, kLanes];
/// each int32 element is a pair of bf16 values.
template <int kRows, int kVectors>
inline void MicroKernel(const int32_t* hidden, const int32_t* weights, int64_t group_pairs,
                        int64_t num_pairs, float* dots, bool first) {
  __m512 sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_setzero_ps();
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    __m512i w[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      w[v] = _mm512_loadu_si512(weights + (v * group_pairs + pair) * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const __m512i h = _mm512_set1_epi32(hidden[pair * kRowBlock + r]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)h, (__m512bh)w[v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      float* to = dots + r * kTileColumns + v * kLanes;
      _mm512_storeu_ps(to, first ? sums[r][v] : _mm512_add_ps(_mm512_loadu_ps(to), sums[r][v]));
    }
  }
}

template <int kRows, int kVectors>
void Dots(const TileDotsParams& params) {
  constexpr int kWidth = kVectors * kLanes;
  static_assert(kTileColumns % kWidth == 0);
  const auto* hidden = static_cast<const int32_t*>(params.hidden) + params.k_begin / 2 * kRowBlock;
  const auto* weights = static_cast<const int32_t*>(params.weight_tile);
  const int64_t row_pairs = Pairs(params.hidden_size);
  const int64_t all_pairs = Pairs(params.k_end - params.k_begin);
  const int64_t num_blocks = (params.num_rows + kRowBlock - 1) / kRowBlock;
  for (int64_t pair = 0; pair < all_pairs; pair += kBlockPairs) {
    const int64_t num_pairs = all_pairs - pair < kBlockPairs ? all_pairs - pair : kBlockPairs;
    for (int64_t column = 0; column < kTileColumns; column += kWidth) {
      for (int64_t block = 0; block < num_blocks; ++block) {
        MicroKernel<kRows, kVectors>(hidden + (block * row_pairs + pair) * kRowBlock,
                                     weights + column * all_pairs + pair * kLanes, all_pairs,
                                     num_pairs,
                                     params.dots + block * kRowBlock * kTileColumns + column,
                                     params.k_begin == 0 && pair == 0);
      }
    }
  }
}

void TileDots(const TileDotsParams& params) {
  if (params.num_rows == 1) return Dots<1, 12>(params);
  if (params.num_rows == 2) return Dots<2, 6>(params);
  if (params.num_rows <= 4) return Dots<4, 6>(params);
  Dots<8, 3>(params);
}

/// Packs rows as [blocks, pairs, kRowBlock, 2] of bf16; missing rows and elements are zero.
void PackRows(Dtype /*dtype: bf16*/, const void* hidden, int64_t num_rows, int64_t hidden_size,
              void* packed) {
  const auto* rows = static_cast<const uint16_t*>(hidden);
  const int64_t block_elements = Pairs(hidden_size) * kRowBlock * 2;
  auto* block = static_cast<uint16_t*>(packed);
  for (int64_t row = 0; row < num_rows; row += kRowBlock, block += block_elements) {
    if (row + kRowBlock > num_rows || hidden_size % 2 != 0) {
      __builtin_memset(block, 0, static_cast<size_t>(block_elements) * sizeof(uint16_t));
    }
    for (int64_t r = 0; r < kRowBlock && row + r < num_rows; ++r) {
      for (int64_t k = 0; k < hidden_size; ++k) {
        block[(k / 2 * kRowBlock + r) * 2 + k % 2] = rows[(row + r) * hidden_size + k];
      }
    }
  }
}

int64_t PackedRowBytes(int64_t hidden_size) { return Pairs(hidden_size) * 4; }

}  // namespace

const DotKernel& Avx512Bf16Dots() {
  static constexpr DotKernel kKernel = {kRowBlock, PackedRowBytes, PackRows, TileDots};
  return kKernel;
}

}  // namespace logprobd::kernels::internal
