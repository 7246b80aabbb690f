#include "kernels/torch_ops/paths/kernel_arrays.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "kernels/chunked/convert_elements.h"
#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "kernels/common/tile.h"
#include "kernels/fused/params.h"
#include "kernels/torch_ops/paths/logits.h"
#include "kernels/torch_ops/rows/kernel_operands.h"
#include "kernels/torch_ops/types/kernel_dtype.h"

namespace logprobd::torch_ops {
namespace {

/// Returns the number of rows, counted from the first of `rows`, whose memory can be read. The
/// memory behind `rows` may hold other data.
int64_t ReadableRows(const at::Tensor& rows) {
  const int64_t elements =
      static_cast<int64_t>(rows.storage().nbytes()) / static_cast<int64_t>(rows.element_size());
  return (elements - rows.storage_offset() - rows.size(1)) / rows.stride(0) + 1;
}

/// Returns the number of values of the weight's dtype that represent a hidden value.
int32_t NumSplits(const Problem& problem) {
  const at::ScalarType hidden = problem.inputs.hidden.scalar_type();
  if (hidden == problem.inputs.weight.scalar_type()) return 1;
  // Two splits represent fp16 exactly.
  return hidden == at::kHalf ? 2 : static_cast<int32_t>(problem.options.hidden_splits);
}

}  // namespace

at::Tensor Aligned(const at::Tensor& rows) {
  const bool is_aligned = rows.stride(1) == 1 && rows.stride(0) >= rows.size(1) &&
                          rows.stride(0) % kRowAlignment == 0 && IsAddressAligned(rows);
  return is_aligned ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

at::Tensor PaddedToTiles(const at::Tensor& values, int64_t columns) {
  at::Tensor padded = at::zeros({kernels::NumTiles(columns) * kernels::kTileColumns},
                                values.options().dtype(at::kFloat));
  padded.narrow(0, 0, columns).copy_(values.narrow(0, 0, columns));
  return padded;
}

FusedRows::FusedRows(const at::Tensor& hidden, const Problem& problem)
    : hidden_size_(hidden.size(1)),
      num_splits_(NumSplits(problem)),
      operand_(num_splits_ == 1 ? Aligned(hidden) : EmptySplits(hidden.size(0), problem)) {
  if (num_splits_ == 1) return;
  const c10::cuda::CUDAGuard on_device(hidden.device());
  const at::Tensor aligned = Aligned(hidden);
  kernels::Bf16SplitParams params;
  params.dtype = *KernelDtype(hidden.scalar_type());
  params.in = aligned.const_data_ptr();
  params.in_stride = aligned.stride(0);
  params.num_rows = aligned.size(0);
  params.hidden_size = hidden_size_;
  params.num_splits = num_splits_;
  params.out = operand_.mutable_data_ptr();
  CheckLaunch(LaunchBf16Split(params, c10::cuda::getCurrentCUDAStream()), "the split of hidden");
}

at::Tensor FusedRows::EmptySplits(int64_t num_rows, const Problem& problem) {
  const int64_t num_splits = NumSplits(problem);
  if (num_splits == 1) return {};
  // The fused kernels are slower if the memory of the rows ends inside a block tile.
  constexpr int64_t kBlockRows = 256;
  const int64_t whole_rows = (num_rows + kBlockRows - 1) / kBlockRows * kBlockRows;
  const at::Tensor rows =
      at::empty({whole_rows, num_splits * kernels::SplitPitch(problem.hidden_size())},
                problem.inputs.weight.options());
  return SliceRows(rows, 0, num_rows);
}

FusedRows FusedRows::Slice(int64_t begin, int64_t size) const {
  FusedRows part = *this;
  part.operand_ = SliceRows(operand_, begin, size);
  return part;
}

std::vector<at::Tensor> FusedRows::Terms() const {
  if (num_splits_ == 1) return {operand_};
  constexpr int32_t kTermsMax = 2;
  std::vector<at::Tensor> terms;
  for (int32_t split = std::max(num_splits_ - kTermsMax, 0); split < num_splits_; ++split) {
    terms.push_back(operand_.narrow(1, split * kernels::SplitPitch(hidden_size_), hidden_size_));
  }
  return terms;
}

namespace {

/// Returns the factor that corrects dot products for the truncation of the tensor cores.
double DotCorrection(const Problem& problem) {
  int major = 0;
  CheckLaunch(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                                     problem.inputs.weight.device().index()),
              "the query of the GPU's compute capability");
  return major == kernels::kTruncationMajor ? kernels::TruncationCorrection(problem.hidden_size())
                                            : 1.0;
}

}  // namespace

FusedHead::FusedHead(const Problem& problem)
    : scale_(problem.options.scale),
      columns_(problem.shard.columns),
      corrected_(kernels::Corrected({.scale = static_cast<float>(scale_),
                                     .softcap = static_cast<float>(problem.options.softcap)},
                                    problem.inputs.bias.has_value(), DotCorrection(problem))),
      weight_(SliceRows(problem.inputs.weight, 0, columns_)) {
  if (problem.inputs.bias.has_value()) bias_ = PaddedToTiles(*problem.inputs.bias, columns_);
}

int64_t FusedHead::num_tiles() const { return kernels::NumTiles(columns_); }

double FusedHead::gradient_per_log2_scale() const { return scale_ / (kLog2E * correction()); }

kernels::FusedPartialsParams FusedHead::Params(const FusedRows& rows, int64_t tile_begin,
                                               int64_t tile_end) const {
  const at::Tensor& hidden = rows.operand();
  kernels::FusedPartialsParams params;
  params.dtype = *KernelDtype(weight_.scalar_type());
  params.num_rows = hidden.size(0);
  params.readable_rows = params.num_rows == 0 ? 0 : ReadableRows(hidden);
  params.hidden_size = weight_.size(1);
  params.num_splits = rows.num_splits();
  params.hidden = hidden.const_data_ptr();
  params.hidden_stride = hidden.stride(0);
  params.weight_stride = weight_.stride(0);
  params.weight = static_cast<const uint16_t*>(weight_.const_data_ptr()) +
                  tile_begin * kernels::kTileColumns * weight_.stride(0);
  params.vocab_size = columns_;
  params.tile_begin = tile_begin;
  params.tile_end = tile_end;
  params.transform = corrected_.transform;
  if (bias_.defined()) params.bias = bias_.const_data_ptr<float>();
  return params;
}

RowArrays::RowArrays(const Rows& rows, const Problem& problem, const FusedHead& head)
    : targets_(FlatTarget(problem.inputs)), row_indices_(rows.row_indices) {
  source_.targets = targets_.const_data_ptr<int64_t>();
  if (row_indices_.defined()) source_.row_indices = row_indices_.const_data_ptr<int64_t>();
  // Temperatures are fp32, as in the service, so that both compute the same bits.
  source_.temperature = static_cast<float>(problem.options.temperature);
  if (problem.inputs.row_temperature.has_value()) {
    temperatures_ = Flat(*problem.inputs.row_temperature).to(at::kFloat).contiguous();
    source_.temperatures = temperatures_.const_data_ptr<float>();
  }
  source_.correction = head.correction();
  source_.first_id = problem.shard.begin;
  source_.num_columns = problem.shard.columns;
}

}  // namespace logprobd::torch_ops
