#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"

namespace logprobd::kernels {

/// Scores of a row in double precision, with which every kernel and engine is compared. The
/// project's README.md defines them ("What the numbers mean"); logarithms are in nats.
struct RowReference {
  double logprob = 0;
  double entropy = 0;
  double lse = 0;
  int32_t argmax_id = -1;
  double argmax_logprob = 0;
  double sum_p_squared = 0;
  double max_logit = 0;
  double min_logit = 0;
  int32_t target_rank = -1;
  std::vector<int32_t> top_k_ids;
  std::vector<double> top_k_logprobs;
  std::vector<double> candidate_logprobs;
};

/// Parameters of the scores of one row.
struct RowQuestion {
  int32_t target = 0;  ///< In [0, logits.size()).
  double temperature = 1;
  double entropy_temperature = 0;  ///< 0: the same as `temperature`.
  int32_t top_k = 0;
  std::vector<int32_t> candidate_ids;
};

/// Scores one row of logits z (after scale, bias and cap, before temperature). A row with a NaN or
/// +inf logit, or whose logits are all -inf, gets NaN scores and -1
/// as ids and rank.
RowReference ScoreRowReference(std::span<const double> logits, const RowQuestion& question);

/// Returns element `index` of an array of `dtype`, exactly.
double ElementReference(const void* array, int64_t index, Dtype dtype);

/// Returns the logits of one hidden row against rows [0, vocab) of a row-major weight, computed in
/// double from the exact stored values. `bias` is empty or [vocab].
std::vector<double> LogitsReference(const void* hidden_row, Dtype hidden_dtype, const void* weight,
                                    Dtype weight_dtype, int64_t vocab, int64_t hidden_size,
                                    const LogitTransform& transform, std::span<const float> bias);

}  // namespace logprobd::kernels
