#pragma once

// GradientEpilogue: turns the dot products of a block tile into their gradients, in 16 bits.
//
// Idea      Given the row's sum, a probability takes one 2^x of the logit, and the gradient takes
//           two more fused multiply-adds. The row's constants are computed beforehand
//           (kernels/common/row_gradient.h).
// Work      A warp holds 16 rows, or 16 rows of every 64 of its warpgroup; a lane processes two of
//           them, eight apart.
// Traffic   Reads 32 bytes of constants per row and writes 2 bytes per column in whole sectors.
// Numerics  fp32, rounded once to the element type. A logit of -inf has the gradient 0; NaN stays
//           NaN.
// Limits    See LaunchFusedGradient.
// Source    Our own.

#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/common/row_gradient.h"
#include "kernels/common/tile_sums.cuh"
#include "kernels/fused/lane_logits.cuh"
#include "kernels/fused/params.h"
#include "kernels/fused/transform_logits.cuh"

namespace logprobd::kernels::internal {

/// FusedGradientParams as the device reads them. Columns and tiles are counted from the first ones
/// of the launch.
template <class Element>
struct GradientEpilogueParams {
  int32_t num_rows;
  int32_t num_columns;
  int32_t num_tiles;
  int32_t first_column;  // First column of the launch, counted in the shard.
  LogitTransform transform;
  const float* bias;
  const float* mean_logit_weights;
  const RowGradient* rows;
  Element* gradients;
  int64_t stride;
};

/// Returns checked parameters as the device reads them.
template <class Element>
GradientEpilogueParams<Element> GradientEpilogueParamsOf(const FusedGradientParams& params) {
  const FusedPartialsParams& head = params.head;
  const int64_t first_column = head.tile_begin * kTileColumns;
  const auto from_first_column = [&](const float* columns) {
    return columns == nullptr ? nullptr : columns + first_column;
  };
  return {.num_rows = static_cast<int32_t>(head.num_rows),
          .num_columns = static_cast<int32_t>(head.vocab_size - first_column),
          .num_tiles = static_cast<int32_t>(head.tile_end - head.tile_begin),
          .first_column = static_cast<int32_t>(first_column),
          .transform = head.transform,
          .bias = from_first_column(head.bias),
          .mean_logit_weights = from_first_column(params.mean_logit_weights),
          .rows = params.rows,
          .gradients = static_cast<Element*>(params.gradients),
          .stride = params.gradient_stride};
}

/// Computes the gradients of the dot products of one row, whose logits are given.
template <class Element, bool kTransforms>
class LogitGradient {
 public:
  __device__ __forceinline__ LogitGradient(const GradientEpilogueParams<Element>& params,
                                           int32_t row)
      : params_(params) {
    const RowGradient& constants = params.rows[row];
    sums_ = *reinterpret_cast<const float4*>(&constants.log2_scale);
    extras_ = *reinterpret_cast<const float4*>(&constants.target);
  }

  /// Returns the target's column, counted in the launch.
  __device__ __forceinline__ int32_t target_column() const {
    return __float_as_int(extras_.y) - params_.first_column;
  }

  /// Turns a lane's logits, in columns of the launch from `first_column`, into the gradients of
  /// their dot products. `Logits` is that of TransformLogits.
  template <class Logits>
  __device__ __forceinline__ void Replace(const Logits& logits, int32_t first_column) const {
    const int32_t target = target_column() - first_column;
    if constexpr (kTransforms) {
      if (params_.mean_logit_weights == nullptr) {
        ReplaceLogits<false>(logits, nullptr, target);
      } else {
        ReplaceLogits<true>(logits, params_.mean_logit_weights + first_column, target);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Logits::kCount; ++i) logits.z(i) = OfLogit(logits.z(i));
      if (target < 0 || target > Logits::Column(Logits::kCount - 1)) return;
#pragma unroll
      for (int i = 0; i < Logits::kCount; ++i) {
        if (target == Logits::Column(i)) logits.z(i) = AddTarget(logits.z(i));
      }
    }
  }

 private:
  /// Returns the gradient of a logit, without the terms of the target and of the mean logit.
  __device__ __forceinline__ float OfLogit(float z) const {
    const float exponent = MaxOrNan(__fmaf_rn(z, sums_.x, -sums_.y), kGradientExponentMin);
    return __fmul_rn(Exp2(exponent), __fmaf_rn(sums_.w, exponent, sums_.z));
  }

  __device__ __forceinline__ float AddTarget(float gradient) const {
    return __fadd_rn(gradient, extras_.x);
  }

  /// Turns logits into the gradients of their dot products.
  template <bool kHasMean, class Logits>
  __device__ __forceinline__ void ReplaceLogits(const Logits& logits,
                                                const float* mean_logit_weights,
                                                int32_t target) const {
    const bool has_cap = params_.transform.softcap > 0.0F;
    const float reciprocal = Reciprocal(params_.transform.softcap);
#pragma unroll
    for (int i = 0; i < Logits::kCount; ++i) {
      const float z = logits.z(i);
      const float share = __fmul_rn(z, reciprocal);
      const float slope = has_cap ? __fmaf_rn(-share, share, 1.0F) : 1.0F;
      float gradient = OfLogit(z);
      if constexpr (kHasMean) {
        gradient = __fmaf_rn(extras_.z, mean_logit_weights[Logits::Column(i)], gradient);
      }
      if (target == Logits::Column(i)) gradient = AddTarget(gradient);
      logits.z(i) = __fmul_rn(gradient, slope);
    }
  }

  const GradientEpilogueParams<Element>& params_;
  float4 sums_;    // log2_scale, log2_sum, free and weighted
  float4 extras_;  // target, target_column and mean
};

template <class Element, bool kTransforms>
class GradientEpilogue {
 public:
  static constexpr bool kHasTransforms = kTransforms;
  using Params = GradientEpilogueParams<Element>;

  LOGPROBD_HOST_DEVICE explicit GradientEpilogue(const Params& params) : params_(params) {}

  /// Processes a lane's logits of one row; `tile` counts from the launch's first tile.
  template <class Logits>
  __device__ __forceinline__ void TakeRow(const Logits& logits, int32_t row, int32_t tile,
                                          int32_t lane_column) {
    const int32_t tile_column = tile * kTileColumns;
    const bool has_row = row < params_.num_rows;
    const int32_t some_row = has_row ? row : params_.num_rows - 1;
    const int32_t first_column = tile_column + lane_column;
    if constexpr (kTransforms) {
      TransformLogits(logits, params_.bias, first_column, params_.transform);
    }
    const LogitGradient<Element, kTransforms> gradient(params_, some_row);
    gradient.Replace(logits, first_column);
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

 protected:
  const Params& params_;
};

}  // namespace logprobd::kernels::internal
