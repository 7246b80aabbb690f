#pragma once

// HeadLoads: the parameters with which our mainloops load hidden rows and the weight.
//
// Idea      Base class of HeadMainloop and SwappedMainloop, which differ in the operand that the
//           weight is. A hidden row may consist of several splits, one after another along K; the
//           weight is then read once per split. When only one cluster reads a weight tile, the
//           weight need not stay in the second-level cache. When blocks proceed along the
//           vocabulary, hidden rows should stay there while the weight passes.
// Source    Our own.

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

namespace logprobd::kernels::internal {

/// `Base` is a collective of CUTLASS, whose mode `kRowMode` has the hidden rows: 0 for M, 1 for N.
template <class Base, int kRowMode>
struct HeadLoads : Base {
  static constexpr int32_t kStep = cute::size<2>(typename Base::TileShape{});

  struct Arguments : Base::Arguments {
    int32_t weight_depth = 0;  ///< K of the weight; the problem's K counts all splits of a row.
    bool reads_weight_once = false;  ///< True when only one cluster reads each weight tile.
    bool keeps_rows = false;  ///< True when the same rows are multiplied by one tile after another.
  };
  struct Params : Base::Params {
    int32_t num_row_tiles = 0;
    int32_t weight_steps = 0;  ///< Steps along K of the weight.
    cute::TMA::CacheHintSm90 hidden_hint;
    cute::TMA::CacheHintSm90 weight_hint;
  };

  template <class Problem>
  static Params to_underlying_arguments(const Problem& problem, const Arguments& arguments,
                                        void* workspace) {
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(problem, arguments, workspace);
    constexpr int32_t kRows = cute::size<kRowMode>(typename Base::TileShape{});
    params.num_row_tiles = (cute::get<kRowMode>(problem) + kRows - 1) / kRows;
    params.weight_steps = (arguments.weight_depth + kStep - 1) / kStep;
    using Hint = cute::TMA::CacheHintSm90;
    params.hidden_hint =
        arguments.reads_weight_once || arguments.keeps_rows ? Hint::EVICT_LAST : Hint::EVICT_NORMAL;
    params.weight_hint = arguments.reads_weight_once ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL;
    return params;
  }

  /// Returns the row tile that a block loads. A block beyond the last row loads rows of another
  /// block: TMA takes longer to fill a box that lies outside the tensor than to load one from the
  /// second-level cache.
  static CUTLASS_DEVICE int32_t ReadableTile(const Params& params, int32_t row_tile) {
    return min(row_tile, params.num_row_tiles - 1);
  }
};

}  // namespace logprobd::kernels::internal
