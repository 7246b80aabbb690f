#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/logit_key.h"
#include "kernels/common/row_sums.h"

// These functions compute the scores of listed ids: candidates and top-k. Every function enqueues
// on `stream`, returns without waiting and is thread-safe. It returns cudaErrorInvalidValue if a
// parameter is out of range, otherwise the error of the launch. Pointers in the *Params point to
// device memory that the caller owns.
namespace logprobd::kernels {

/// Inputs and outputs of LaunchCandidateScores.
struct CandidateScoresParams {
  const int32_t* rows = nullptr;  ///< [count], rows of the batch.
  int32_t row_begin = 0;          ///< Row of the batch that normalizers[0] belongs to.
  int32_t row_end = 0;  ///< Entries whose row is outside [row_begin, row_end) are not touched.
  int64_t count = 0;    ///< 0 does nothing.
  const RowNormalizer* normalizers = nullptr;  ///< [row_end - row_begin]
  const float* log2_scales = nullptr;          ///< [row_end - row_begin]
  float* scores = nullptr;                     ///< [count], logits in, logprobs out.
};

/// Turns the logits of candidates into log-probabilities, in place.
[[nodiscard]] cudaError_t LaunchCandidateScores(const CandidateScoresParams& params,
                                                cudaStream_t stream);

/// Inputs and outputs of LaunchTopKScores.
struct TopKScoresParams {
  int64_t num_rows = 0;                        ///< 0 does nothing.
  int32_t top_k = 0;                           ///< 1 to kTopKMax.
  const uint64_t* keys = nullptr;              ///< [num_rows, top_k], LogitKeys, best first.
  const RowNormalizer* normalizers = nullptr;  ///< [num_rows]
  const float* log2_scales = nullptr;          ///< [num_rows]
  /// [num_rows, top_k], best first; -1 in a row that is not finite and where the vocabulary has
  /// fewer than top_k ids.
  int32_t* ids = nullptr;
  float* logprobs = nullptr;  ///< [num_rows, top_k]; NaN where `ids` is -1.
};

/// Turns LogitKeys into ids and log-probabilities.
[[nodiscard]] cudaError_t LaunchTopKScores(const TopKScoresParams& params, cudaStream_t stream);

/// Largest number of shards whose top-k lists can be merged.
inline constexpr int32_t kMergeShardsMax = 16;

/// Inputs and outputs of LaunchMergeTopK.
struct MergeTopKParams {
  int64_t num_rows = 0;    ///< 0 to 2^31 - 1; 0 does nothing.
  int32_t top_k = 0;       ///< 1 to kTopKMax.
  int32_t num_shards = 0;  ///< 1 to kMergeShardsMax.
  /// [num_shards, num_rows, top_k], LogitKeys, each list best first; 0 marks an empty slot.
  const uint64_t* gathered = nullptr;
  /// [num_rows, top_k], written: the best of all lists, best first. Must not overlap `gathered`.
  uint64_t* keys = nullptr;
};

/// Merges the shards' top-k lists of every row. Keys other than empty slots are distinct, so the
/// result does not depend on the order of the shards.
[[nodiscard]] cudaError_t LaunchMergeTopK(const MergeTopKParams& params, cudaStream_t stream);

}  // namespace logprobd::kernels
