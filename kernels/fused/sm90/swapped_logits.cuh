#pragma once

// How the lanes of a warpgroup share the accumulators of a swapped tile, whose columns are wgmma's
// operand A, and how they write rows of 16-bit elements.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "kernels/common/tile.h"
#include "kernels/fused/lane_logits.cuh"
#include "kernels/fused/sm90/swapped_mainloop.cuh"

namespace logprobd::kernels::internal {

/// Exchanges two registers, by instructions that the compiler does not see through: it would
/// rename registers instead, and repeat the code for each of them.
CUTLASS_DEVICE void Exchange(float& a, float& b) {
  asm volatile(
      "{\n"
      ".reg .b32 old;\n"
      "mov.b32 old, %0;\n"
      "mov.b32 %0, %1;\n"
      "mov.b32 %1, old;\n"
      "}\n"
      : "+f"(a), "+f"(b));
}

/// A lane's share of a swapped tile of `kRows` rows: links of one chain (tile_sums.cuh) of pairs of
/// rows. This is a view of the accumulators because there are not enough registers for a copy. Its
/// indices are constants once loops are unrolled.
template <class Dots, int kRows>
struct SwappedLogits {
  static constexpr int kPairs = kRows / 8;  ///< Pairs of rows of a lane.
  static constexpr int kHalves = 2;         ///< Links of a chain in the 16 columns of a product.
  static constexpr int kLinks = SwappedColumns::kProducts * kHalves;

  Dots& dots;
  const int thread;
  const int warp = __shfl_sync(0xFFFFFFFFU, thread / 32, 0);  // uniform for the compiler too
  const int chain = thread % 32 / 4;
  const int quad_lane = thread % 4;
  /// The column of link 0, relative to the tile.
  const int32_t first_column = SwappedColumns::Begin(warp, 0) + chain;

  /// Returns the column of a link, relative to the tile.
  CUTLASS_DEVICE int32_t Column(int link) const { return first_column + kTileChains * link; }

  /// Returns the first of the eight rows of which the lanes of a warp hold the same pair, relative
  /// to the block.
  static constexpr CUTLASS_DEVICE int FirstRowOf(int pair) { return 8 * pair; }

  /// Returns a row of the lane's pair, relative to the block.
  CUTLASS_DEVICE int RowOf(int pair, int odd) const {
    return FirstRowOf(pair) + 2 * quad_lane + odd;
  }

  /// Returns the logit of a link of the chain in row RowOf(pair, odd).
  CUTLASS_DEVICE float& z(int pair, int odd, int link) const {
    using Layout = typename Dots::layout_type;
    static_assert(cute::size<0, 0>(Layout{}) == 2 && cute::size<0, 1>(Layout{}) == kHalves &&
                  cute::size<0, 2>(Layout{}) == kPairs &&
                  cute::size<1>(Layout{}) == SwappedColumns::kProducts);
    return dots(cute::make_coord(odd, link % kHalves, pair), link / kHalves, 0);
  }

  /// Calls visit(pair) for every pair of rows, whose logits are z(pair, odd, link) during the call.
  /// The code for half of the pairs serves the other half too, after an exchange of registers: it
  /// is run once a tile, and fetching instructions takes longer than running them.
  template <class Visit>
  CUTLASS_DEVICE void ForHalves(const Visit& visit) const {
    constexpr int kHalf = kPairs / 2;
    static_assert(kPairs % 2 == 0);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int pair = 0; pair < kHalf; ++pair) {
        visit(pair);
#pragma unroll
        for (int i = 0; i < 2 * kLinks; ++i) {
          Exchange(z(pair, i % 2, i / 2), z(pair + kHalf, i % 2, i / 2));
        }
      }
    }
  }
};

/// The logits of one pair of rows of SwappedLogits: z(i) is link i / 2 of row i % 2, and Column(i)
/// is relative to the lane's first column, as in LaneLogits.
template <class Swapped>
struct SwappedPair {
  static constexpr int kCount = 2 * Swapped::kLinks;
  const Swapped& logits;
  const int pair;

  CUTLASS_DEVICE float& z(int i) const { return logits.z(pair, i % 2, i / 2); }
  static constexpr CUTLASS_DEVICE int Column(int i) { return kTileChains * (i / 2); }
};

/// The logits of one row of SwappedLogits, as SwappedPair has those of two.
template <class Swapped>
struct SwappedRow {
  static constexpr int kCount = Swapped::kLinks;
  const Swapped& logits;
  const int pair;
  const int odd;

  CUTLASS_DEVICE float& z(int i) const { return logits.z(pair, odd, i); }
  static constexpr CUTLASS_DEVICE int Column(int i) { return kTileChains * i; }
};

/// Transposes a matrix of 8 x 8 elements of 16 bits. Lane l passes elements 2 (l % 4) and
/// 2 (l % 4) + 1 of row l / 4, and gets those of the transposed matrix.
CUTLASS_DEVICE uint32_t Transposed(uint32_t pair) {
  uint32_t transposed = 0;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

/// Writes a warp's share of eight rows of a swapped tile as 16-bit elements. After a transposition
/// in registers, lane 4 r + q holds two columns of row r of the eight, and TileRowStore writes
/// them. All lanes of a warp must call Write together.
template <class Element>
class SwappedRowStore {
 public:
  /// `rows` has the rows of the launch, `stride` elements apart. Rows at or beyond `num_rows` are
  /// not written.
  template <class Logits>
  CUTLASS_DEVICE SwappedRowStore(const Logits& logits, Element* rows, int64_t stride,
                                 int32_t block_row, int pair, int32_t tile_column, int32_t num_rows)
      : SwappedRowStore(logits, rows + tile_column, stride,
                        block_row + Logits::FirstRowOf(pair) + logits.chain, num_rows) {}

  /// Writes the lane's columns of two successive links; each argument has the elements of both rows
  /// of the pair.
  CUTLASS_DEVICE void Write(int link, uint32_t first, uint32_t second) const {
    store_.WritePairs(link, Transposed(first), Transposed(second));
  }

 private:
  template <class Logits>
  CUTLASS_DEVICE SwappedRowStore(const Logits& logits, Element* tile_rows, int64_t stride,
                                 int32_t row, int32_t num_rows)
      : store_(tile_rows + min(row, num_rows - 1) * stride + SwappedColumns::Begin(logits.warp, 0),
               2 * logits.quad_lane, row < num_rows) {}

  TileRowStore<Element> store_;
};

}  // namespace logprobd::kernels::internal
