#include "kernels/torch_ops/paths/kernel_arrays.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/logit_transform.h"
#include "kernels/common/tile.h"
#include "kernels/fused_sm90/fused_partials.h"
#include "kernels/torch_ops/paths/logits.h"

namespace logprobd::torch_ops {
namespace {

constexpr int64_t kVectorBytes = 16;

bool IsAddressAligned(const at::Tensor& values) {
  return reinterpret_cast<uintptr_t>(values.const_data_ptr()) % kVectorBytes == 0;
}

/// Returns the rows themselves if the fused kernels can read them in place, otherwise a copy.
at::Tensor Aligned(const at::Tensor& rows) {
  const bool is_aligned = rows.stride(1) == 1 && rows.stride(0) >= rows.size(1) &&
                          rows.stride(0) % kRowAlignment == 0 && IsAddressAligned(rows);
  return is_aligned ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

/// Returns the number of rows, counted from the first of `rows`, whose memory can be read. The
/// memory behind `rows` may hold other data.
int64_t ReadableRows(const at::Tensor& rows) {
  const int64_t elements =
      static_cast<int64_t>(rows.storage().nbytes()) / static_cast<int64_t>(rows.element_size());
  return (elements - rows.storage_offset() - rows.size(1)) / rows.stride(0) + 1;
}

at::Tensor FlatOrUndefined(const MaybeTensor& values) {
  return values.has_value() ? Flat(*values) : at::Tensor();
}

bool IsFp32On(const at::Tensor& values, const at::Device& device) {
  return !values.defined() || (values.scalar_type() == at::kFloat && values.device() == device);
}

}  // namespace

void CheckLaunch(int error, const char* what) {
  TORCH_CHECK(error == cudaSuccess, what,
              " failed: ", cudaGetErrorString(static_cast<cudaError_t>(error)));
}

const float* Floats(const at::Tensor& values) {
  return values.defined() ? values.const_data_ptr<float>() : nullptr;
}

bool IsVectorAligned(const at::Tensor& rows) {
  const auto is_aligned = [&](int64_t elements) {
    return elements * static_cast<int64_t>(rows.element_size()) % kVectorBytes == 0;
  };
  return rows.stride(1) == 1 && is_aligned(rows.size(1)) && rows.stride(0) >= 0 &&
         is_aligned(rows.stride(0)) && IsAddressAligned(rows);
}

kernels::CopyRowsParams CopyParams(const at::Tensor& source, const at::Tensor& rows) {
  const auto element_size = static_cast<int64_t>(source.element_size());
  kernels::CopyRowsParams params;
  params.num_rows = rows.size(0);
  params.source = source.const_data_ptr();
  params.source_stride_bytes = source.stride(0) * element_size;
  params.row_bytes = source.size(1) * element_size;
  params.rows = rows.mutable_data_ptr();
  return params;
}

at::Tensor PaddedToTiles(const at::Tensor& values, int64_t columns) {
  at::Tensor padded = at::zeros({kernels::NumTiles(columns) * kernels::kTileColumns},
                                values.options().dtype(at::kFloat));
  padded.narrow(0, 0, columns).copy_(values.narrow(0, 0, columns));
  return padded;
}

UpstreamArrays::UpstreamArrays(const UpstreamGradients& upstream)
    : logprob_(FlatOrUndefined(upstream.logprob)),
      entropy_(FlatOrUndefined(upstream.entropy)),
      lse_(FlatOrUndefined(upstream.lse)),
      mean_logit_(FlatOrUndefined(upstream.mean_logit)) {}

bool UpstreamArrays::AreFp32On(const at::Device& device) const {
  return IsFp32On(logprob_, device) && IsFp32On(entropy_, device) && IsFp32On(lse_, device) &&
         IsFp32On(mean_logit_, device);
}

kernels::RowValues UpstreamArrays::Values(const at::Tensor& values) {
  if (!values.defined()) return {};
  return {values.const_data_ptr<float>(), values.stride(0)};
}

FusedHead::FusedHead(const at::Tensor& hidden, const Problem& problem)
    : scale_(problem.options.scale),
      softcap_(problem.options.softcap),
      correction_(kernels::TruncationCorrection(hidden.size(1))),
      columns_(problem.shard.columns),
      transforms_(problem.inputs.bias.has_value() || scale_ != 1 || softcap_ > 0),
      hidden_(Aligned(hidden)),
      weight_(Aligned(SliceRows(problem.inputs.weight, 0, columns_))) {
  if (problem.inputs.bias.has_value()) bias_ = PaddedToTiles(*problem.inputs.bias, columns_);
}

FusedHead FusedHead::Slice(int64_t begin, int64_t size) const {
  FusedHead part = *this;
  part.hidden_ = SliceRows(hidden_, begin, size);
  return part;
}

int64_t FusedHead::num_tiles() const { return kernels::NumTiles(columns_); }

// When dot products are transformed, the correction is part of the transform.
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

RowArrays::RowArrays(const Rows& rows, const Problem& problem, const FusedHead& head)
    : targets_(FlatTarget(problem.inputs).contiguous()), row_indices_(rows.row_indices) {
  source_.targets = targets_.const_data_ptr<int64_t>();
  if (row_indices_.defined()) source_.row_indices = row_indices_.const_data_ptr<int64_t>();
  source_.temperature = problem.options.temperature;
  if (problem.inputs.row_temperature.has_value()) {
    temperatures_ = Flat(*problem.inputs.row_temperature).to(at::kDouble).contiguous();
    source_.temperatures = temperatures_.const_data_ptr<double>();
  }
  source_.log2_factor = head.log2_factor();
  source_.first_id = problem.shard.begin;
  source_.num_columns = problem.shard.columns;
}

}  // namespace logprobd::torch_ops
