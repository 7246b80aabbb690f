// CandidateScoresKernel, TopKScoresKernel: logits of listed ids -> logprobs.
//
// Idea      The same LogprobOf as for the target, once the row's normaliser is known: equal logits
//           get equal bits whichever list they stand in.
// Work      A thread an entry.
// Traffic   Some 40 bytes an entry.
// Numerics  fp64, rounded once.
// Limits    2^31 entries a launch.
// Source    Our own.

#include <cstdint>

#include "kernels/combine/list_scores.h"
#include "kernels/common/logit_key.h"

namespace logprobd::kernels {
namespace {

constexpr int kBlockThreads = 256;

__global__ void __launch_bounds__(kBlockThreads)
    CandidateScoresKernel(const CandidateScoresParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (i >= params.count) return;
  const int32_t row = params.rows[i];
  if (row < params.row_begin || row >= params.row_end) return;
  const int32_t local = row - params.row_begin;
  params.scores[i] =
      LogprobOf(params.scores[i], params.log2_scales[local], params.normalizers[local]);
}

__global__ void __launch_bounds__(kBlockThreads) TopKScoresKernel(const TopKScoresParams params) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (i >= params.num_rows * params.top_k) return;
  const int64_t row = i / params.top_k;
  const uint64_t key = params.keys[i];
  const RowNormalizer normalizer = params.normalizers[row];
  if (key == 0 || !normalizer.finite) {
    params.ids[i] = -1;
    params.logprobs[i] = NAN;
    return;
  }
  const LogitEntry entry = LogitEntryOf(key);
  params.ids[i] = entry.id;
  params.logprobs[i] = LogprobOf(entry.logit, params.log2_scales[row], normalizer);
}

uint32_t Blocks(int64_t count) {
  return static_cast<uint32_t>((count + kBlockThreads - 1) / kBlockThreads);
}

}  // namespace

cudaError_t LaunchCandidateScores(const CandidateScoresParams& params, cudaStream_t stream) {
  if (params.count < 0 || params.count > INT32_MAX) return cudaErrorInvalidValue;
  if (params.count == 0) return cudaSuccess;
  if (params.rows == nullptr || params.normalizers == nullptr || params.log2_scales == nullptr ||
      params.scores == nullptr) {
    return cudaErrorInvalidValue;
  }
  CandidateScoresKernel<<<Blocks(params.count), kBlockThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchTopKScores(const TopKScoresParams& params, cudaStream_t stream) {
  if (params.num_rows < 0 || params.top_k < 1 || params.top_k > kTopKMax ||
      params.num_rows * params.top_k > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  if (params.keys == nullptr || params.normalizers == nullptr || params.log2_scales == nullptr ||
      params.ids == nullptr || params.logprobs == nullptr) {
    return cudaErrorInvalidValue;
  }
  TopKScoresKernel<<<Blocks(params.num_rows * params.top_k), kBlockThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace logprobd::kernels
