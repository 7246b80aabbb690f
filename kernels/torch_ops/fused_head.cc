#include "kernels/torch_ops/fused_head.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/zeros.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "kernels/common/logit_transform.h"
#include "kernels/common/tile.h"
#include "kernels/fused_sm90/fused_partials.h"
#include "kernels/torch_ops/logits.h"
#include "kernels/torch_ops/products.h"
#include "kernels/torch_ops/views.h"

namespace logprobd::torch_ops {
namespace {

constexpr int64_t kRowAlignment = 8;  // elements, 16 bytes
constexpr uintptr_t kByteAlignment = 16;

/// Rows that lie as the kernels read them; a copy where they do not.
at::Tensor Aligned(const at::Tensor& rows) {
  const bool is_aligned = rows.stride(1) == 1 && rows.stride(0) >= rows.size(1) &&
                          rows.stride(0) % kRowAlignment == 0 &&
                          reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kByteAlignment == 0;
  return is_aligned ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

/// Rows that may be read from the first on: memory that is there though it is another's rows.
int64_t ReadableRows(const at::Tensor& rows) {
  const int64_t elements =
      static_cast<int64_t>(rows.storage().nbytes()) / static_cast<int64_t>(rows.element_size());
  return (elements - rows.storage_offset() - rows.size(1)) / rows.stride(0) + 1;
}

}  // namespace

bool IsFused(const LinearLogprobInputs& inputs) {
  if (!IsMultipliedAsIs(inputs.hidden, inputs.weight) || !kernels::HasFusedKernel()) return false;
  const auto* const device = at::cuda::getDeviceProperties(inputs.hidden.get_device());
  return device->major == 9 && device->minor == 0 && inputs.weight.size(1) % kRowAlignment == 0;
}

at::Tensor PaddedToTiles(const at::Tensor& values, int64_t columns) {
  at::Tensor padded = at::zeros({kernels::NumTiles(columns) * kernels::kTileColumns},
                                values.options().dtype(at::kFloat));
  padded.narrow(0, 0, columns).copy_(values.narrow(0, 0, columns));
  return padded;
}

FusedHead::FusedHead(const at::Tensor& hidden, const LinearLogprobInputs& inputs,
                     const LinearLogprobOptions& options, const Shard& shard)
    : scale_(options.scale),
      softcap_(options.softcap),
      correction_(kernels::TruncationCorrection(hidden.size(1))),
      columns_(shard.columns),
      transforms_(inputs.bias.has_value() || options.scale != 1 || options.softcap > 0),
      hidden_(Aligned(hidden)),
      weight_(Aligned(RowsFrom(inputs.weight, 0, shard.columns))) {
  if (inputs.bias.has_value()) bias_ = PaddedToTiles(*inputs.bias, columns_);
}

int64_t FusedHead::num_tiles() const { return kernels::NumTiles(columns_); }

// Where dot products are transformed, it is there that the correction belongs.
double FusedHead::log2_factor() const { return transforms_ ? kLog2E : kLog2E * correction_; }

double FusedHead::gradient_per_log2_scale() const { return scale_ / log2_factor(); }

kernels::FusedPartialsParams FusedHead::Params(int64_t tile_begin, int64_t tile_end) const {
  kernels::FusedPartialsParams params;
  params.dtype =
      hidden_.scalar_type() == at::kBFloat16 ? kernels::Dtype::kBf16 : kernels::Dtype::kF16;
  params.num_rows = hidden_.size(0);
  params.readable_rows = params.num_rows == 0 ? 0 : ReadableRows(hidden_);
  params.hidden_size = hidden_.size(1);
  params.hidden = hidden_.const_data_ptr();
  params.hidden_stride = hidden_.stride(0);
  params.weight_stride = weight_.stride(0);
  params.weight = static_cast<const uint16_t*>(weight_.const_data_ptr()) +
                  tile_begin * kernels::kTileColumns * weight_.stride(0);
  params.vocab_size = columns_;
  params.tile_begin = tile_begin;
  params.tile_end = tile_end;
  if (transforms_) {
    params.transform.scale = static_cast<float>(scale_ * correction_);
    params.transform.softcap = static_cast<float>(softcap_);
  }
  if (bias_.defined()) params.bias = bias_.const_data_ptr<float>();
  return params;
}

RowArrays::RowArrays(const Rows& rows, const LinearLogprobInputs& inputs,
                     const LinearLogprobOptions& options, const Shard& shard, const FusedHead& head)
    : targets_(FlatTarget(inputs).contiguous()), places_(rows.index) {
  source_.targets = targets_.const_data_ptr<int64_t>();
  if (places_.defined()) source_.row_indices = places_.const_data_ptr<int64_t>();
  source_.temperature = options.temperature;
  if (inputs.row_temperature.has_value()) {
    temperatures_ = Flat(*inputs.row_temperature).to(at::kDouble).contiguous();
    source_.temperatures = temperatures_.const_data_ptr<double>();
  }
  source_.log2_factor = head.log2_factor();
  source_.first_id = shard.begin;
  source_.num_columns = shard.columns;
}

}  // namespace logprobd::torch_ops
