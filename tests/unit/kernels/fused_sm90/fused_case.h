#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/dtype.h"
#include "kernels/common/logit_transform.h"
#include "kernels/fused_sm90/fused_choice.h"
#include "kernels/fused_sm90/fused_partials.h"
#include "tests/unit/kernels/chunked/device_array.h"

namespace logprobd::testing {

/// What outputs hold before a run.
inline constexpr float kPoison = -12345.5F;

/// Tests of the fused kernels: skipped where the current device does not run them.
class HopperTest : public ::testing::Test {
 protected:
  void SetUp() override;
};

/// Rows and a head on the host, in values that their dtype holds exactly.
struct FusedCase {
  kernels::Dtype dtype = kernels::Dtype::kBf16;  ///< Of the head, and of hidden unless is_f32.
  bool is_f32 = false;                           ///< Hidden rows are fp32, scored as terms.
  int32_t num_splits = kernels::kHiddenSplits;   ///< Of fp32 rows.
  int64_t num_rows = 0;
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  std::vector<float> hidden;  ///< [num_rows, hidden_size]
  std::vector<float> weight;  ///< [vocab_size, hidden_size]
  std::vector<float> bias;    ///< [vocab_size], or empty
  kernels::LogitTransform transform;
  std::vector<float> temperatures;          ///< [num_rows]
  std::vector<float> entropy_temperatures;  ///< [num_rows], or empty
  std::vector<int32_t> targets;             ///< [num_rows]
};

struct FusedCaseSizes {
  int64_t rows = 5;
  int64_t hidden = 64;
  int64_t vocab = 192;
  double logit_stddev = 3;
  kernels::Dtype dtype = kernels::Dtype::kBf16;
  bool is_f32 = false;
};

/// Unit normal rows; targets over the vocabulary, its first and last column and tile edges first.
FusedCase MakeFusedCase(const FusedCaseSizes& sizes);

/// The rows of `all` named by `rows`, in that order.
FusedCase CompactRows(const FusedCase& all, const std::vector<int64_t>& rows);

/// In double precision, of the exact values.
double DotOf(const FusedCase& inputs, int64_t row, int64_t column);
double LogitOf(const FusedCase& inputs, double dot, int64_t column);

struct FusedScores {
  std::vector<float> logprob;
  std::vector<float> entropy;
  std::vector<float> lse;
  std::vector<int32_t> argmax_id;
  std::vector<float> argmax_logprob;
  std::vector<float> max_logit;
  std::vector<float> min_logit;
  std::vector<float> sum_p_squared;
  std::vector<uint8_t> nonfinite;
};

/// How to score: an instance instead of the chosen one, with everything asked or only logprob and
/// entropy.
struct FusedAsk {
  std::optional<kernels::FusedChoice> choice = {};
  bool everything = true;
  /// So many rows are computed, which the kernel reads in device memory; by default all.
  std::optional<int64_t> row_count = {};
};

/// A shard's tiles, half-open; by default all.
struct ShardTiles {
  int64_t begin = 0;
  int64_t end = std::numeric_limits<int64_t>::max();
};

/// What a shard knows of the rows; sums lie as `layout` says.
struct ShardPartials {
  kernels::PartialLayout layout;
  std::vector<kernels::TileSums> sums;
  std::vector<kernels::TileSums> entropy_sums;  ///< Poisoned unless the case has them.
  std::vector<float> tile_max;                  ///< [num_rows, the shard's tiles]
  std::vector<float> target_logits;             ///< kPoison where another shard has the target.
  std::vector<uint64_t> max_keys;
  std::vector<uint32_t> min_keys;
};

/// A case in device memory; may be scored again and again, on its own stream, with outputs poisoned
/// before each run. Rows of room hold NaN and may be read.
class FusedRun {
 public:
  explicit FusedRun(const FusedCase& inputs, int64_t rows_of_room = 0);
  ~FusedRun();
  FusedRun(const FusedRun&) = delete;
  FusedRun& operator=(const FusedRun&) = delete;

  /// Enqueues partials and scores; the test fails where a launch does.
  void Enqueue(const FusedAsk& ask = {});
  /// Waits. Scores that were not asked are poison.
  FusedScores Read() const;

  /// Each row's best keys, by way of the tiles' maxima, in `workspace_bytes` of scratch; waits.
  std::vector<uint64_t> TopK(int32_t top_k, int64_t workspace_bytes, const ShardTiles& tiles = {});

  /// Everything that a launch over a shard gives, in memory of its tiles alone; waits.
  ShardPartials PartialsOf(const ShardTiles& tiles,
                           const kernels::CachedExponentials& exponentials = {});

  struct Listed {
    std::vector<int32_t> rows;
    std::vector<int32_t> ids;
    int32_t row_begin = 0;
    ShardTiles tiles = {};
  };
  /// Logits of listed (row, id) pairs, kPoison where there is none; waits.
  std::vector<float> ListedLogits(const Listed& listed);

  /// Inputs, and the outputs that are always asked.
  kernels::FusedPartialsParams Partials(const ShardTiles& tiles = {}) const;

  /// Logits of the targets as the kernel wrote them; waits.
  std::vector<float> TargetLogits();
  cudaStream_t stream() const { return stream_; }

 private:
  struct Memory;

  const FusedCase& inputs_;
  const int64_t rows_of_room_;
  std::unique_ptr<Memory> memory_;
  cudaStream_t stream_ = nullptr;
};

FusedScores RunFused(const FusedCase& inputs, const FusedAsk& ask = {});

/// Scores in double precision, from the same values.
struct RowTruth {
  double logprob;
  double entropy;
  double lse;
  int32_t argmax_id;
  double max_logit;
  double min_logit;
  double sum_p_squared;
};
RowTruth TruthOf(const FusedCase& inputs, int64_t row);

struct Tolerance {
  double logprob = 1e-4;
  double entropy = 2e-4;
};

/// Compares a sample of the rows, first and last among them, with the truth.
void ExpectNearTruth(const FusedCase& inputs, const FusedScores& scores,
                     const Tolerance& tolerance = {});

/// Logprob and entropy alone, or all scores, bit for bit.
void ExpectSameBits(const FusedScores& a, const FusedScores& b, bool everything = true);

}  // namespace logprobd::testing
