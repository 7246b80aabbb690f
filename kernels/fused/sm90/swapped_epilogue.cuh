#pragma once

// SwappedEpilogue: does the same as HeadEpilogue, with the same bits, where the weight is wgmma's
// operand A (swapped_mainloop.cuh) and a hidden row is a column of the accumulators.
//
// Idea      A lane holds six of the 24 links of one chain of a row (tile_sums.cuh): those of
//           its warp, in ascending order. The chains are therefore added warp by warp: warp w
//           continues the sums that warp w - 1 has written to shared memory. The warps work on
//           successive chunks of rows, so that all of them are busy.
// Work      Lane 4 c + q holds chain c of rows 8 j + 2 q + {0, 1}. One thread owns each row of the
//           block: it reads the row's scale and target, joins the maxima and chains of the lanes,
//           and writes the row's sums. Shuffles would take longer than shared memory.
// Traffic   Writes 16 bytes per row and tile, and 384 bytes more when exponentials are cached.
// Numerics  See kernels/common/tile_sums.cuh. Every exponential has the floor, which does not
//           change finite terms.
// Limits    See LaunchFusedPartials.
// Source    Our own.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "kernels/common/logit_key.h"
#include "kernels/common/tile_sums.cuh"
#include "kernels/fused/head_epilogue.cuh"
#include "kernels/fused/sm90/epilogue_interface.cuh"
#include "kernels/fused/sm90/swapped_logits.cuh"
#include "kernels/fused/transform_logits.cuh"

namespace logprobd::kernels::internal {

template <bool kTransforms, bool kCachesExponentials, int kRows>
class SwappedEpilogue : public EpilogueInterface<HeadEpilogueParams> {
  using Base = EpilogueInterface<HeadEpilogueParams>;

  static constexpr int kWarps = SwappedColumns::kWarps;
  static constexpr int kThreads = 32 * kWarps;
  // Exponentials on their way to memory leave registers for fewer sums.
  static constexpr int kChunkPairs = kCachesExponentials ? 1 : 2;
  static constexpr int kChunks = kRows / 8 / kChunkPairs;
  static constexpr int kChunkRows = 2 * kChunkPairs;  ///< Rows of a lane in a chunk.
  /// Floats from the maxima of a row to those of the next row. The padding avoids bank conflicts of
  /// both the lanes that write and the threads that read.
  static constexpr int kMaximaPitch = kWarps * kTileChains + 4;
  static_assert(kRows % 16 == 0 && kRows <= kThreads);

  /// Constants of a row with which every lane adds exponentials.
  struct Origin {
    float log2_scale;
    float k;
  };
  /// Values of a row with which the lanes find single logits.
  struct Search {
    int32_t target_column;  ///< Relative to the tile; beyond it when another tile has the target.
    float target_logit;     ///< Set when ranks are counted.
    float raised_max;       ///< The tile's maximum if it may be the row's, otherwise NaN.
  };

 public:
  /// Sums of the chains; the last warp completes them.
  struct Chains {
    /// On their way from a warp to the next one, for two chunks: sum and weighted sum.
    float2 links[kWarps - 1][2][kChunkRows][32];
    float square_links[kWarps - 1][2][kChunkRows][32];
    float2 complete[kRows][kTileChains + 1];  ///< The padding avoids bank conflicts.
    float complete_squares[kRows][kTileChains + 1];
  };
  struct SharedStorage {
    alignas(16) Origin origins[kRows];
    Search searches[kRows];
    alignas(8) float factors[kCachesExponentials ? kRows : 1];  ///< Of cached exponentials.
    union {
      alignas(16) float maxima[kRows][kMaximaPitch];  ///< Largest logit of each warp and chain.
      Chains chains;
    };
  };

  using Base::Base;

  template <class Problem, class BlockShape, class Coordinate, class Engine, class Layout,
            class Mma, class Residue>
  CUTLASS_DEVICE void operator()(const Problem&, BlockShape, const Coordinate& coordinate,
                                 cute::Tensor<Engine, Layout>& dots, const Mma&, const Residue&,
                                 int thread, char* shared) {
    const int32_t tile_of_launch = cute::get<0>(coordinate);
    const int32_t block_row = cute::get<1>(coordinate) * kRows;
    if (tile_of_launch >= params_.num_tiles || block_row >= params_.num_rows) return;
    Tile<cute::Tensor<Engine, Layout>>{{dots, thread},
                                       params_,
                                       *reinterpret_cast<SharedStorage*>(shared),
                                       params_.tile_begin + tile_of_launch,
                                       block_row}
        .Process();
  }

 private:
  static CUTLASS_DEVICE void Synchronize() { cutlass::arch::NamedBarrier::sync(kThreads, 0); }

  /// One tile of one block of rows.
  template <class Dots>
  struct Tile : SwappedLogits<Dots, kRows> {
    using Logits = SwappedLogits<Dots, kRows>;
    using Logits::chain;
    using Logits::Column;
    using Logits::first_column;
    using Logits::kLinks;
    using Logits::kPairs;
    using Logits::RowOf;
    using Logits::thread;
    using Logits::warp;
    using Logits::z;

    const Params& params;
    SharedStorage& shared;
    const int32_t tile;
    const int32_t block_row;
    const int32_t tile_column = tile * kTileColumns;

    /// Returns true for the lane of each pair of rows that acts for the warp's eight chains.
    CUTLASS_DEVICE bool ActsForWarp() const { return chain == 0; }

    CUTLASS_DEVICE void Process() const {
      const bool owns = thread < kRows && block_row + thread < params.num_rows;
      const int32_t row = owns ? block_row + thread : params.num_rows - 1;
      // These loads start early because they have the latency of the second-level cache.
      const float log2_scale = params.log2_scales[row];
      const int32_t target = params.targets[row];
      if constexpr (kTransforms) Transform();
      if (tile_column + kTileColumns > params.vocab_size) MaskColumns();
      ShareMaxima();

      float max_logit = 0.0F;
      TileOrigin origin{};
      bool has_target = false;
      bool raises = false;
      if (thread < kRows) {
        max_logit = MaxOfRow();
        origin = TileOriginOf(max_logit, log2_scale);
        shared.origins[thread] = {log2_scale, origin.k};
        const int32_t column = target < params.vocab_size ? target - tile_column : -1;
        has_target = owns && column >= 0 && column < kTileColumns;
        raises = owns && params.max_keys != nullptr && OrderedBits(max_logit) >= BestOf(row);
        Search& search = shared.searches[thread];
        search.target_column = has_target ? column : kTileColumns;
        search.raised_max = raises ? max_logit : NAN;
        if constexpr (kCachesExponentials) {
          const ExponentialScale scale =
              ExponentialScaleOf(origin, ReferenceOf(params.exponentials, row));
          shared.factors[thread] = scale.factor;
          if (owns) {
            params.exponentials.exponents[row * params.exponentials.exponent_stride + tile] =
                scale.exponent;
          }
        }
        if (params.rank_counts != nullptr) {
          // Ranks compare ids, so a target of another tile keeps its place before or after it.
          search.target_column = target - tile_column;
          search.target_logit = params.target_logits[row];
        }
      }
      const bool finds_target = SynchronizeAny(has_target);
      const int64_t partial = params.layout.At(row, tile);
      if (!kCachesExponentials && params.wants_sum_squares) {
        AddChains<true, false>();
        if (owns) StoreSums<true>(params.sums + partial, origin);
      } else {
        AddChains<false, kCachesExponentials>();
        if (owns) StoreSums<false>(params.sums + partial, origin);
      }
      if (owns && params.tile_max != nullptr) {
        params.tile_max[row * params.tile_max_stride + tile] = max_logit;
      }
      if (params.entropy_sums != nullptr) {
        if (thread < kRows) {
          const float entropy_scale = params.entropy_log2_scales[row];
          origin = TileOriginOf(max_logit, entropy_scale);
          shared.origins[thread] = {entropy_scale, origin.k};
        }
        Synchronize();
        AddChains<false, false>();
        if (owns) StoreSums<false>(params.entropy_sums + partial, origin);
      }
      if (finds_target) StoreTargets();
      if (params.rank_counts != nullptr) AddRanks();
      if (params.max_keys != nullptr && SynchronizeAny(raises)) RaiseMaxima();
      if (params.min_keys != nullptr) RaiseMinima();
    }

    /// Waits for the warpgroup; returns true if `condition` is true for any of its threads.
    CUTLASS_DEVICE bool SynchronizeAny(bool condition) const {
      constexpr uint32_t kBarrier = cutlass::arch::NamedBarrier::ReservedNamedBarrierCount;
      uint32_t any = 0;
      asm volatile(
          "{\n"
          ".reg .pred in, out;\n"
          "setp.ne.u32 in, %1, 0;\n"
          "barrier.cta.red.or.pred out, %2, %3, in;\n"
          "selp.u32 %0, 1, 0, out;\n"
          "}\n"
          : "=r"(any)
          : "r"(condition ? 1U : 0U), "n"(kBarrier), "n"(kThreads)
          : "memory");
      return any != 0;
    }

    CUTLASS_DEVICE void Transform() const {
      this->ForHalves([&](int pair) {
        TransformLogits(SwappedPair<Logits>{*this, pair}, params.bias, tile_column + first_column,
                        params.transform);
      });
    }

    CUTLASS_DEVICE void MaskColumns() const {
#pragma unroll
      for (int link = 0; link < kLinks; ++link) {
        if (tile_column + Column(link) < params.vocab_size) continue;
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          z(pair, 0, link) = -INFINITY;
          z(pair, 1, link) = -INFINITY;
        }
      }
    }

    CUTLASS_DEVICE void ShareMaxima() const {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float max_logit = z(pair, odd, 0);
#pragma unroll
          for (int link = 1; link < kLinks; ++link) {
            max_logit = MaxOrNan(max_logit, z(pair, odd, link));
          }
          shared.maxima[RowOf(pair, odd)][warp * kTileChains + chain] = max_logit;
        }
      }
      Synchronize();
    }

    /// Returns the largest logit of the row that the thread owns.
    CUTLASS_DEVICE float MaxOfRow() const {
      const auto* const maxima = reinterpret_cast<const float4*>(shared.maxima[thread]);
      float max_logit = -INFINITY;
#pragma unroll
      for (int i = 0; i < kWarps * kTileChains / 4; ++i) {
        const float4 four = maxima[i];
        max_logit =
            MaxOrNan(max_logit, MaxOrNan(MaxOrNan(four.x, four.y), MaxOrNan(four.z, four.w)));
      }
      return max_logit;
    }

    /// Returns the upper half of the row's max_keys entry: OrderedBits of its largest logit so far.
    CUTLASS_DEVICE uint32_t BestOf(int32_t row) const {
      return reinterpret_cast<const volatile uint32_t*>(params.max_keys + row)[1];
    }

    /// Completes the chains of every row of the block, and writes the exponentials if kWrites is
    /// true. shared.origins must be set.
    template <bool kSquares, bool kWrites>
    CUTLASS_DEVICE void AddChains() const {
      // Warp w starts w chunks late. All warps synchronise kChunks + kWarps - 1 times.
      for (int i = 0; i < warp; ++i) Synchronize();
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        AddChunk<kSquares, kWrites>(chunk);
        Synchronize();
      }
      for (int i = warp; i < kWarps - 1; ++i) Synchronize();
    }

    /// Adds the warp's links to the chains of a chunk of rows, which the warps before it have
    /// begun.
    template <bool kSquares, bool kWrites>
    CUTLASS_DEVICE void AddChunk(int chunk) const {
      const int lane = thread % 32;
      const int buffer = chunk % 2;
      Chains& chains = shared.chains;
      ChainSums sums[kChunkRows];
      Origin origins[kChunkRows];
#pragma unroll
      for (int i = 0; i < kChunkRows; i += 2) {
        const int row = RowOf(chunk * kChunkPairs + i / 2, 0);
        const float4 two = *reinterpret_cast<const float4*>(&shared.origins[row]);
        origins[i] = {two.x, two.y};
        origins[i + 1] = {two.z, two.w};
      }
      if (warp > 0) {
#pragma unroll
        for (int i = 0; i < kChunkRows; ++i) {
          const float2 link = chains.links[warp - 1][buffer][i][lane];
          sums[i].sum = link.x;
          sums[i].weighted = link.y;
          if constexpr (kSquares) sums[i].squares = chains.square_links[warp - 1][buffer][i][lane];
        }
      }
      // The rows of the chunk are independent and hide each other's latency.
#pragma unroll
      for (int link = 0; link < kLinks; link += 2) {
        float exponentials[2][kChunkRows];
#pragma unroll
        for (int next = 0; next < 2; ++next) {
#pragma unroll
          for (int i = 0; i < kChunkRows; ++i) {
            exponentials[next][i] = sums[i].template Add<kSquares, true>(
                z(chunk * kChunkPairs + i / 2, i % 2, link + next), origins[i].log2_scale,
                origins[i].k);
          }
        }
        if constexpr (kWrites) WriteExponentials(chunk, link, exponentials);
      }
#pragma unroll
      for (int i = 0; i < kChunkRows; ++i) {
        const float2 both = make_float2(sums[i].sum, sums[i].weighted);
        const int row = RowOf(chunk * kChunkPairs + i / 2, i % 2);
        if (warp < kWarps - 1) {
          chains.links[warp][buffer][i][lane] = both;
          if constexpr (kSquares) chains.square_links[warp][buffer][i][lane] = sums[i].squares;
        } else {
          chains.complete[row][chain] = both;
          if constexpr (kSquares) chains.complete_squares[row][chain] = sums[i].squares;
        }
      }
    }

    /// Writes the exponentials of two successive links of a chunk of rows.
    CUTLASS_DEVICE void WriteExponentials(int chunk, int link,
                                          const float (&exponentials)[2][kChunkRows]) const {
#pragma unroll
      for (int i = 0; i < kChunkRows; i += 2) {
        const int pair = chunk * kChunkPairs + i / 2;
        const float2 factors =
            *reinterpret_cast<const float2*>(&shared.factors[this->RowOf(pair, 0)]);
        const auto column = [&](int next) {
          return PackPair<__nv_bfloat16>(__fmul_rn(exponentials[next][i], factors.x),
                                         __fmul_rn(exponentials[next][i + 1], factors.y));
        };
        const CachedExponentials& cache = params.exponentials;
        const SwappedRowStore<__nv_bfloat16> store(*this, cache.values,
                                                   cache.row_tiles * kTileColumns, block_row, pair,
                                                   tile_column, params.num_rows);
        store.Write(link, column(0), column(1));
      }
    }

    /// Joins the chains of the row that the thread owns, in the order of a butterfly over lanes.
    template <bool kSquares>
    CUTLASS_DEVICE void StoreSums(TileSums* out, const TileOrigin& origin) const {
      ChainSums sums[kTileChains];
#pragma unroll
      for (int i = 0; i < kTileChains; ++i) {
        const float2 both = shared.chains.complete[thread][i];
        sums[i].sum = both.x;
        sums[i].weighted = both.y;
        if constexpr (kSquares) sums[i].squares = shared.chains.complete_squares[thread][i];
      }
#pragma unroll
      for (int distance = 1; distance < kTileChains; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kTileChains; i += 2 * distance) sums[i].Join(sums[i + distance]);
      }
      StoreTileSums(out, origin, sums[0]);
    }

    /// Calls visit(pair, odd, row, search) for each row of the lane that the launch has.
    template <class Visit>
    CUTLASS_DEVICE void ForEachRow(const Visit& visit) const {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          visit(pair, odd, block_row + RowOf(pair, odd), shared.searches[RowOf(pair, odd)]);
        }
      }
    }

    CUTLASS_DEVICE void StoreTargets() const {
      ForEachRow([&](int pair, int odd, int32_t row, const Search& search) {
        const int32_t distance = search.target_column - first_column;
        if (row >= params.num_rows || tile_column + search.target_column >= params.vocab_size ||
            distance < 0 || distance % kTileChains != 0)
          return;
#pragma unroll
        for (int link = 0; link < kLinks; ++link) {
          if (distance == kTileChains * link) params.target_logits[row] = z(pair, odd, link);
        }
      });
    }

    CUTLASS_DEVICE void AddRanks() const {
      ForEachRow([&](int pair, int odd, int32_t row, const Search& search) {
        int32_t count = 0;
#pragma unroll
        for (int link = 0; link < kLinks; ++link) {
          count += RanksAbove(z(pair, odd, link), Column(link), search.target_logit,
                              search.target_column)
                       ? 1
                       : 0;
        }
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) count += __shfl_xor_sync(0xFFFFFFFFU, count, mask);
        if (ActsForWarp() && row < params.num_rows && count > 0) {
          atomicAdd(params.rank_counts + row, count);
        }
      });
    }

    CUTLASS_DEVICE void RaiseMaxima() const {
      ForEachRow([&](int pair, int odd, int32_t row, const Search& search) {
        int32_t found = -1;
#pragma unroll
        for (int link = kLinks - 1; link >= 0; --link) {
          if (z(pair, odd, link) == search.raised_max) found = Column(link);
        }
        if (found < 0) return;  // always so beyond the launch's rows, whose raised_max is NaN
        atomicMax(reinterpret_cast<unsigned long long*>(params.max_keys + row),
                  LogitKey(search.raised_max, tile_column + found));
      });
    }

    CUTLASS_DEVICE void RaiseMinima() const {
      ForEachRow([&](int pair, int odd, int32_t row, const Search&) {
        float min_logit = INFINITY;
#pragma unroll
        for (int link = 0; link < kLinks; ++link) {
          if (tile_column + Column(link) < params.vocab_size) {
            min_logit = fminf(min_logit, z(pair, odd, link));
          }
        }
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
          min_logit = fminf(min_logit, __shfl_xor_sync(0xFFFFFFFFU, min_logit, mask));
        }
        if (!ActsForWarp() || row >= params.num_rows) return;
        const uint32_t key = ~OrderedBits(min_logit);
        if (key > *static_cast<const volatile uint32_t*>(params.min_keys + row)) {
          atomicMax(params.min_keys + row, key);
        }
      });
    }
  };
};

}  // namespace logprobd::kernels::internal
