#pragma once

// Definition of LaunchFusedInstance. The generated sources (instance.cu.in) instantiate it for a
// block tile and a dtype, with or without a logit transform, and with or without cached
// exponentials.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/fused_sm90/fused_launch.h"
#include "kernels/fused_sm90/head_epilogue.cuh"
#include "kernels/fused_sm90/head_kernel.cuh"
#include "kernels/fused_sm90/swapped_epilogue.cuh"

namespace logprobd::kernels::internal {

/// Returns `exponentials` with pointers that are offset for indices that count tiles of the whole
/// vocabulary.
inline CachedExponentials CacheIndexedByVocabularyTile(CachedExponentials exponentials,
                                                       int64_t tile_begin) {
  exponentials.values =
      IndexedByVocabularyTile(exponentials.values, tile_begin, int64_t{kTileColumns});
  exponentials.exponents = IndexedByVocabularyTile(exponentials.exponents, tile_begin, int64_t{1});
  if (exponentials.exponent_stride == 0) exponentials.exponent_stride = exponentials.row_tiles;
  return exponentials;
}

template <FusedTile kTile, Dtype kDtype, bool kTransforms, bool kCachesExponentials>
cudaError_t LaunchFusedInstance(const FusedPartialsParams& params, const FusedChoice& choice,
                                cudaStream_t stream) {
  const auto num_tiles = static_cast<int32_t>(params.tile_end - params.tile_begin);
  const int64_t tile_stride = params.layout.tile_stride;
  const HeadEpilogueParams epilogue = {
      static_cast<int32_t>(params.num_rows),
      static_cast<int32_t>(params.vocab_size),
      static_cast<int32_t>(params.tile_begin),
      num_tiles,
      params.transform,
      params.bias,
      params.log2_scales,
      params.entropy_log2_scales,
      params.targets,
      params.layout,
      IndexedByVocabularyTile(params.sums, params.tile_begin, tile_stride),
      IndexedByVocabularyTile(params.entropy_sums, params.tile_begin, tile_stride),
      params.target_logits,
      params.max_keys,
      params.min_keys,
      params.rank_counts,
      IndexedByVocabularyTile(params.tile_max, params.tile_begin, 1),
      num_tiles,
      params.wants_sum_squares,
      CacheIndexedByVocabularyTile(params.exponentials, params.tile_begin)};
  if constexpr (IsSwapped(kTile)) {
    constexpr auto kRows = static_cast<int>(TileRows(kTile));
    return LaunchHeadKernel<kTile, kDtype,
                            SwappedEpilogue<kTransforms, kCachesExponentials, kRows>>(
        params, choice, epilogue, stream);
  } else {
    return LaunchHeadKernel<kTile, kDtype, HeadEpilogue<kTransforms, kCachesExponentials>>(
        params, choice, epilogue, stream);
  }
}

}  // namespace logprobd::kernels::internal
