#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/fused/params.h"
#include "kernels/fused/top_k_scratch.h"

namespace logprobd::kernels::internal {

/// Pairs (row, tile) of the same tile that one block multiplies: order[begin, begin + count).
/// `tile` is counted from the shard's first tile.
struct TileGroup {
  int32_t tile;
  int32_t begin;
  int32_t count;
};
static_assert(sizeof(TileGroup) == kTopKGroupBytes);

/// Inputs and outputs of LaunchWgmmaTileLogits and LaunchMmaTileLogits. All pointers except
/// `partials` are device memory. Pair r * top_k + i is row row_begin + r and its i-th tile.
struct TileLogitsParams {
  /// In host memory; only rows, weight, bias, transform and sizes are read.
  const FusedPartialsParams* partials = nullptr;
  int64_t row_begin = 0;
  int32_t top_k = 0;
  /// [rows, top_k], LogitKeys of the row's largest maxima, best first, whose ids are tiles; 0 is an
  /// empty slot.
  const uint64_t* tile_keys = nullptr;
  const int32_t* order = nullptr;       ///< [pairs], pairs sorted by tile.
  const TileGroup* groups = nullptr;    ///< [*num_groups]
  const int32_t* num_groups = nullptr;  ///< One number.
  int64_t num_groups_max = 0;           ///< Upper bound of *num_groups, known to the host.
  /// Maximum number of pairs per group, one of kTopKGroupPairs; affects only the time.
  int32_t group_pairs = 0;
  /// [rows, CandidatesPerRow(top_k)], written: LogitKeys, among them the row's top_k largest, in an
  /// unspecified order; 0 is an empty entry. The entries of empty slots are not written.
  uint64_t* candidates = nullptr;
};

}  // namespace logprobd::kernels::internal
