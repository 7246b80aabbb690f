#pragma once

// What becomes of a block tile's dot products in the backward pass: their gradient, in 16 bits.
//
// Idea      A probability is one 2^x of the logit once the row's sum is known, and the gradient two
//           fused multiply-adds of it; the row's constants come ready
//           (kernels/common/row_gradient.h).
// Traffic   32 bytes a row in a row of constants, 2 bytes a column out, by whole sectors.
// Numerics  fp32, rounded once to the element. Logits of -inf have the gradient 0, NaN stays NaN.

#include <cstdint>

#include "kernels/common/row_gradient.h"
#include "kernels/common/tile_sums.cuh"
#include "kernels/fused_sm90/tile_epilogue.cuh"
#include "kernels/fused_sm90/tile_store.cuh"

namespace logprobd::kernels::internal {

/// As FusedGradientParams, on the device; columns and tiles count from the launch's first.
template <class Element>
struct GradientEpilogueParams {
  int32_t num_rows;
  int32_t num_columns;
  int32_t num_tiles;
  int32_t first_column;  // of the launch, in the shard
  LogitTransform transform;
  const float* bias;
  const float* mean_logit_weights;
  const RowGradient* rows;
  Element* gradients;
  int64_t stride;
};

template <class Element, bool kTransforms>
class GradientEpilogue
    : public TileEpilogue<GradientEpilogue<Element, kTransforms>, GradientEpilogueParams<Element>> {
  using Base =
      TileEpilogue<GradientEpilogue<Element, kTransforms>, GradientEpilogueParams<Element>>;
  using Base::params_;

 public:
  using Base::Base;

  template <class Logits>
  __device__ __forceinline__ void TakeRow(const Logits& logits, int32_t row, int32_t tile,
                                          int32_t lane_column) {
    const int32_t tile_column = tile * kTileColumns;
    const bool has_row = row < params_.num_rows;
    const int32_t some_row = has_row ? row : params_.num_rows - 1;
    const RowGradient& constants = params_.rows[some_row];
    const float4 sums = *reinterpret_cast<const float4*>(&constants.log2_scale);
    const float4 extras = *reinterpret_cast<const float4*>(&constants.target);
    const int32_t first_column = tile_column + lane_column;
    const int32_t target = __float_as_int(extras.y) - params_.first_column - first_column;
#pragma unroll
    for (int i = 0; i < Logits::kCount; ++i) {
      float& z = logits.z(i);
      float slope = 1.0F;
      if constexpr (kTransforms) {
        const int32_t column = first_column + Logits::Column(i);
        z = LogitOf(z, params_.bias == nullptr ? 0.0F : params_.bias[column], params_.transform);
        if (params_.transform.softcap > 0.0F) {
          const float share = __fmul_rn(z, Reciprocal(params_.transform.softcap));
          slope = __fmaf_rn(-share, share, 1.0F);
        }
      }
      const float exponent = MaxOrNan(__fmaf_rn(z, sums.x, -sums.y), kGradientExponentMin);
      float gradient = __fmul_rn(Exp2(exponent), __fmaf_rn(sums.w, exponent, sums.z));
      if constexpr (kTransforms) {
        if (params_.mean_logit_weights != nullptr) {
          const int32_t column = first_column + Logits::Column(i);
          gradient = __fmaf_rn(extras.z, params_.mean_logit_weights[column], gradient);
        }
        if (target == Logits::Column(i)) gradient = __fadd_rn(gradient, extras.x);
        gradient = __fmul_rn(gradient, slope);
      }
      z = gradient;
    }
    if (!kTransforms && target >= 0 && target < kTileColumns && target % kTileChains < 2) {
#pragma unroll
      for (int i = 0; i < Logits::kCount; ++i) {
        if (target == Logits::Column(i)) logits.z(i) = __fadd_rn(logits.z(i), extras.x);
      }
    }
    if (tile_column + kTileColumns > params_.num_columns) {
#pragma unroll
      for (int i = 0; i < Logits::kCount; ++i) {
        if (first_column + Logits::Column(i) >= params_.num_columns) logits.z(i) = 0.0F;
      }
    }
    const TileRowStore store(params_.gradients + some_row * params_.stride + tile_column,
                             lane_column, has_row);
#pragma unroll
    for (int i = 0; i < Logits::kCount; i += 4) {
      store.Write(i, make_float4(logits.z(i), logits.z(i + 1), logits.z(i + 2), logits.z(i + 3)));
    }
  }
};

}  // namespace logprobd::kernels::internal
