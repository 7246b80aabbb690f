#pragma once

// Dot products in fp32 for any pair of element types: both operands are converted exactly.
//
// Idea      A micro-kernel keeps kRows x kVectors vectors of sums in registers while it processes a
//           block of hidden elements (BlockK). The block's sums are then added to the tile of dot
//           products, so the error grows with the block's length plus the number of blocks, not
//           with their product.
// Work      With many rows, a block of the weight is converted once into a panel that fits the
//           caches and is used by all rows. With few rows, the micro-kernel converts while it
//           reads.
// Traffic   Reads the weight tile once; the panel is at most kDotScratchBytes.
// Numerics  Each dot product is one chain of multiply-adds per block, in the order of the hidden
//           elements, for every height and width of the kernel. The bits therefore do not depend on
//           the number of rows.
// Limits    Each file for an instruction set includes this file; everything here has internal linkage.
// Source    Our own.

#include <cstdint>
#include <type_traits>

#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/tile_kernels.h"

namespace logprobd::kernels {
namespace {

/// Returns the number of hidden elements per block. Products of bf16 or fp16 values have short
/// mantissas: a chain of them rounds little, and the addition of blocks dominates the error, so
/// blocks are longer. For fp32 the opposite holds. tests/bench/cpu_accuracy measures the errors.
constexpr int64_t BlockK(Dtype weight) { return weight == Dtype::kF32 ? 64 : 128; }
static_assert(KChunk(Dtype::kF32) % BlockK(Dtype::kF32) == 0 &&
              KChunk(Dtype::kBf16) % BlockK(Dtype::kBf16) == 0);

/// Returns the number of hidden elements of a packed row, padded to whole pairs.
constexpr int64_t PaddedHidden(int64_t hidden_size) { return (hidden_size + 1) / 2 * 2; }

/// Weights in a panel of fp32, [num_k, kVectors * lanes]. Load returns kVectors vectors of columns
/// for kSteps hidden elements, starting with element k.
template <class V>
struct PanelWeights {
  static constexpr int kSteps = 1;
  const float* panel;
  template <int kVectors>
  void Load(int64_t k, typename V::Float (&out)[kSteps][kVectors]) const {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) out[0][v] = V::Load(panel + (k * kVectors + v) * V::kLanes);
  }
};

/// Weights in a packed tile, starting with column `first_column` and the tile's hidden element
/// `k_begin`. Load behaves like that of PanelWeights and also converts to fp32.
template <class V, Dtype kDtype>
struct TileWeights {
  using Element = std::conditional_t<kDtype == Dtype::kF32, float, uint16_t>;
  static constexpr int kSteps = kDtype == Dtype::kBf16 ? 2 : 1;
  const Element* tile;
  int64_t group_stride;  // elements
  int64_t column;

  TileWeights(const TileDotsParams& params, int64_t k_begin, int64_t first_column)
      : tile(static_cast<const Element*>(params.weight_tile) + k_begin * kGroupColumns),
        group_stride(PackedHidden(kDtype, params.k_end - params.k_begin) * kGroupColumns),
        column(first_column) {}

  template <int kVectors>
  void Load(int64_t k, typename V::Float (&out)[kSteps][kVectors]) const {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = column + v * V::kLanes;
      const Element* from = tile + at / kGroupColumns * group_stride + k * kGroupColumns +
                            at % kGroupColumns * kSteps;
      if constexpr (kDtype == Dtype::kBf16) {
        V::LoadPairs(from, out[0][v], out[1][v]);
      } else if constexpr (kDtype == Dtype::kF16) {
        out[0][v] = V::LoadHalf(from);
      } else {
        out[0][v] = V::Load(from);
      }
    }
  }
};

/// Adds num_k products to kRows x (kVectors * kLanes) dot products, or sets them if `first`.
/// `hidden` is [num_k, kRowBlock]; the first kRows of each kRowBlock are used.
template <class V, int kRowBlock, int kRows, int kVectors, class Weights>
inline void MicroKernel(const float* hidden, const Weights& weights, int64_t num_k, float* dots,
                        bool first) {
  typename V::Float sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = V::Set(0.0F);
  }
  for (int64_t k = 0; k < num_k; k += Weights::kSteps) {
    typename V::Float w[Weights::kSteps][kVectors];
    weights.template Load<kVectors>(k, w);
#pragma GCC unroll 2
    for (int s = 0; s < Weights::kSteps; ++s) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const typename V::Float h = V::Set(hidden[(k + s) * kRowBlock + r]);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sums[r][v] = V::MulAdd(h, w[s][v], sums[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      float* to = dots + r * kTileColumns + v * V::kLanes;
      V::Store(to, first ? sums[r][v] : V::Add(V::Load(to), sums[r][v]));
    }
  }
}

/// Multiplies the first kRows rows of one block by the packed tile.
template <class V, int kRowBlock, int kRows, int kVectors, Dtype kDtype>
void DirectDotsOf(const TileDotsParams& params) {
  constexpr int kWidth = kVectors * V::kLanes;
  static_assert(kTileColumns % kWidth == 0);
  constexpr int64_t kBlockK = BlockK(kDtype);
  const auto* hidden = static_cast<const float*>(params.hidden) + params.k_begin * kRowBlock;
  const int64_t all_k = PackedHidden(kDtype, params.k_end - params.k_begin);
  for (int64_t column = 0; column < kTileColumns; column += kWidth) {
    for (int64_t k = 0; k < all_k; k += kBlockK) {
      const int64_t num_k = all_k - k < kBlockK ? all_k - k : kBlockK;
      MicroKernel<V, kRowBlock, kRows, kVectors>(
          hidden + k * kRowBlock, TileWeights<V, kDtype>(params, k, column), num_k,
          params.dots + column, params.k_begin == 0 && k == 0);
    }
  }
}

template <class V, int kRowBlock, int kRows, int kVectors>
void DirectDots(const TileDotsParams& params) {
  switch (params.weight_dtype) {
    case Dtype::kBf16:
      return DirectDotsOf<V, kRowBlock, kRows, kVectors, Dtype::kBf16>(params);
    case Dtype::kF16:
      return DirectDotsOf<V, kRowBlock, kRows, kVectors, Dtype::kF16>(params);
    case Dtype::kF32:
      return DirectDotsOf<V, kRowBlock, kRows, kVectors, Dtype::kF32>(params);
  }
}

/// Multiplies any number of row blocks by the tile. The weights of a block of hidden elements are
/// converted to panels, [kTileColumns / kWidth, num_k, kWidth], which all row blocks share.
template <class V, int kRowBlock, int kVectors, Dtype kDtype>
void PanelDotsOf(const TileDotsParams& params) {
  constexpr int kWidth = kVectors * V::kLanes;
  constexpr int kSteps = TileWeights<V, kDtype>::kSteps;
  static_assert(kTileColumns % kWidth == 0);
  constexpr int64_t kBlockK = BlockK(kDtype);
  static_assert(kBlockK * kTileColumns * 4 <= kDotScratchBytes);
  auto* panels = static_cast<float*>(params.scratch);
  const auto* hidden = static_cast<const float*>(params.hidden) + params.k_begin * kRowBlock;
  const int64_t padded_hidden = PaddedHidden(params.hidden_size);
  const int64_t all_k = PackedHidden(kDtype, params.k_end - params.k_begin);
  const int64_t num_blocks = (params.num_rows + kRowBlock - 1) / kRowBlock;
  for (int64_t k_begin = 0; k_begin < all_k; k_begin += kBlockK) {
    const int64_t num_k = all_k - k_begin < kBlockK ? all_k - k_begin : kBlockK;
    for (int64_t column = 0; column < kTileColumns; column += kWidth) {
      float* panel = panels + column * num_k;
      const TileWeights<V, kDtype> weights(params, k_begin, column);
      for (int64_t k = 0; k < num_k; k += kSteps) {
        typename V::Float w[kSteps][kVectors];
        weights.template Load<kVectors>(k, w);
        for (int s = 0; s < kSteps; ++s) {
          for (int v = 0; v < kVectors; ++v) {
            V::Store(panel + (k + s) * kWidth + v * V::kLanes, w[s][v]);
          }
        }
      }
      for (int64_t block = 0; block < num_blocks; ++block) {
        MicroKernel<V, kRowBlock, kRowBlock, kVectors>(
            hidden + (block * padded_hidden + k_begin) * kRowBlock, PanelWeights<V>{panel}, num_k,
            params.dots + block * kRowBlock * kTileColumns + column,
            params.k_begin == 0 && k_begin == 0);
      }
    }
  }
}

template <class V, int kRowBlock, int kVectors>
void PanelDots(const TileDotsParams& params) {
  switch (params.weight_dtype) {
    case Dtype::kBf16:
      return PanelDotsOf<V, kRowBlock, kVectors, Dtype::kBf16>(params);
    case Dtype::kF16:
      return PanelDotsOf<V, kRowBlock, kVectors, Dtype::kF16>(params);
    case Dtype::kF32:
      return PanelDotsOf<V, kRowBlock, kVectors, Dtype::kF32>(params);
  }
}

/// Packs rows as [blocks, PaddedHidden, kRowBlock] of fp32; missing rows and elements are zero.
template <class V, int kRowBlock>
void PackRowsF32(Dtype dtype, const void* hidden, int64_t num_rows, int64_t hidden_size,
                 void* packed) {
  const int64_t padded_hidden = PaddedHidden(hidden_size);
  auto* block = static_cast<float*>(packed);
  for (int64_t row = 0; row < num_rows; row += kRowBlock, block += kRowBlock * padded_hidden) {
    if (row + kRowBlock > num_rows || hidden_size != padded_hidden) {
      __builtin_memset(block, 0, static_cast<size_t>(kRowBlock * padded_hidden) * sizeof(float));
    }
    for (int r = 0; r < kRowBlock && row + r < num_rows; ++r) {
      const int64_t from = (row + r) * hidden_size;
      switch (dtype) {
        case Dtype::kBf16:
          for (int64_t k = 0; k < hidden_size; ++k) {
            const auto bits = static_cast<uint32_t>(static_cast<const uint16_t*>(hidden)[from + k])
                              << 16;
            __builtin_memcpy(block + k * kRowBlock + r, &bits, sizeof(bits));
          }
          break;
        case Dtype::kF16:
          for (int64_t k = 0; k < hidden_size; ++k) {
            block[k * kRowBlock + r] =
                V::HalfToFloat(static_cast<const uint16_t*>(hidden)[from + k]);
          }
          break;
        case Dtype::kF32:
          for (int64_t k = 0; k < hidden_size; ++k) {
            block[k * kRowBlock + r] = static_cast<const float*>(hidden)[from + k];
          }
          break;
      }
    }
  }
}

constexpr int64_t PackedRowBytesF32(int64_t hidden_size) {
  return PaddedHidden(hidden_size) * static_cast<int64_t>(sizeof(float));
}

}  // namespace
}  // namespace logprobd::kernels
