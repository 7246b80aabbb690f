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
#include "kernels/fused/choice.h"
#include "kernels/fused/listed_logits.h"
#include "kernels/fused/params.h"
#include "kernels/fused/top_k.h"
#include "tests/unit/kernels/chunked/device_array.h"

namespace logprobd::testing {

/// Initial content of outputs.
inline constexpr float kPoison = -12345.5F;

/// The kernels that the tests launch where they do not choose a tile. The tests of this folder are
/// built twice, once for each kind of kernel.
#ifdef LOGPROBD_TEST_SM80
inline constexpr kernels::FusedArch kTestedArch = kernels::FusedArch::kSm80;
#else
inline constexpr kernels::FusedArch kTestedArch = kernels::FusedArch::kSm90;
#endif

/// Base class of the tests of the fused kernels. It skips them on devices that cannot run the
/// tested kernels.
class FusedTest : public ::testing::Test {
 protected:
  void SetUp() override;
};

/// Returns the block tiles of all kernels that the device runs, whatever kernels are tested: on
/// Hopper those of both kinds, whose bits must be equal.
std::vector<kernels::FusedTile> TilesToTest();
/// Returns those of them that can cache exponentials.
std::vector<kernels::FusedTile> CachingTilesToTest();
/// Returns those of them for which the gradient kernel has instances.
std::vector<kernels::FusedTile> GradientTilesToTest();

/// Call the launches of kernels/fused for the tested kernels; a choice replaces the fastest
/// one.
[[nodiscard]] cudaError_t LaunchPartials(const kernels::FusedPartialsParams& params,
                                         cudaStream_t stream,
                                         std::optional<kernels::FusedChoice> choice = {});
[[nodiscard]] cudaError_t LaunchGradient(const kernels::FusedGradientParams& params,
                                         cudaStream_t stream,
                                         std::optional<kernels::FusedChoice> choice = {});
[[nodiscard]] cudaError_t LaunchTopK(const kernels::FusedTopKParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchListed(const kernels::ListedLogitsParams& params,
                                       cudaStream_t stream);

/// Rows and a head on the host. Values are exactly representable in their dtype.
struct FusedCase {
  kernels::Dtype dtype =
      kernels::Dtype::kBf16;  ///< Element type of the head, and of hidden unless is_f32.
  bool is_f32 = false;        ///< True if hidden rows are fp32, which are scored as bf16 splits.
  int32_t num_splits = kernels::kHiddenSplits;  ///< Splits of fp32 rows.
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

/// Makes standard normal rows. Targets cover the vocabulary, starting with its first and last
/// column and tile edges.
FusedCase MakeFusedCase(const FusedCaseSizes& sizes);

/// Returns the rows of `all` that `rows` lists, in that order.
FusedCase SelectRows(const FusedCase& all, const std::vector<int64_t>& rows);

/// Returns a dot product in double precision, from the exact values.
double DotOf(const FusedCase& inputs, int64_t row, int64_t column);
/// Returns the logit of a column in double precision, from its dot product.
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

/// Options of a run. A choice replaces the fastest one; `everything` requests all outputs, not only
/// logprob and entropy.
struct FusedAsk {
  std::optional<kernels::FusedChoice> choice = {};
  bool everything = true;
  /// Content of row_count in device memory; by default row_count is null.
  std::optional<int64_t> row_count = {};
};

/// Half-open range of the tiles of a shard. By default it contains all tiles.
struct ShardTiles {
  int64_t begin = 0;
  int64_t end = std::numeric_limits<int64_t>::max();
};

/// Outputs of a launch over a shard. `layout` is the layout of both sums.
struct ShardPartials {
  kernels::PartialLayout layout;
  std::vector<kernels::TileSums> sums;
  std::vector<kernels::TileSums>
      entropy_sums;                  ///< Poison unless the case has entropy temperatures.
  std::vector<float> tile_max;       ///< [num_rows, the shard's tiles]
  std::vector<float> target_logits;  ///< kPoison where another shard holds the target.
  std::vector<uint64_t> max_keys;
  std::vector<uint32_t> min_keys;
};

/// A case in device memory, which can be scored repeatedly on its own stream. Outputs are poisoned
/// before each run. `rows_of_room` additional hidden rows hold NaN and may be read.
class FusedRun {
 public:
  explicit FusedRun(const FusedCase& inputs, int64_t rows_of_room = 0);
  ~FusedRun();
  FusedRun(const FusedRun&) = delete;
  FusedRun& operator=(const FusedRun&) = delete;

  /// Enqueues the computation of partials and scores. A failed launch fails the test.
  void Enqueue(const FusedAsk& ask = {});
  /// Waits and returns the scores. Scores that were not requested are poison.
  FusedScores Read() const;

  /// Runs LaunchFusedTopK with `workspace_bytes` of scratch, waits, and returns each row's top-k
  /// keys.
  std::vector<uint64_t> TopK(int32_t top_k, int64_t workspace_bytes, const ShardTiles& tiles = {});

  /// Launches over a shard with buffers that cover only the shard's tiles, waits, and returns all
  /// outputs. Without a choice, the launch makes its own.
  ShardPartials PartialsOf(const ShardTiles& tiles,
                           const kernels::CachedExponentials& exponentials = {},
                           const std::optional<kernels::FusedChoice>& choice = std::nullopt);

  struct Listed {
    std::vector<int32_t> rows;
    std::vector<int32_t> ids;
    int32_t row_begin = 0;
    ShardTiles tiles = {};
  };
  /// Waits for and returns the logits of listed (row, id) pairs. A logit that was not written is
  /// kPoison.
  std::vector<float> ListedLogits(const Listed& listed);

  /// Computes the logits of the targets, launches over a shard with `choice` or the fastest one,
  /// waits, and returns the counts of logits above each row's target.
  std::vector<int32_t> RankCounts(const ShardTiles& tiles = {},
                                  std::optional<kernels::FusedChoice> choice = {});

  /// Returns the parameters of a launch with all inputs and the mandatory outputs.
  kernels::FusedPartialsParams Partials(const ShardTiles& tiles = {}) const;

  /// Waits for and returns the logits of the targets as the kernel writes them.
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

/// Scores of a row in double precision, computed from the exact values.
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

/// Compares a sample of the rows, including the first and the last, with the truth.
void ExpectNearTruth(const FusedCase& inputs, const FusedScores& scores,
                     const Tolerance& tolerance = {});

/// Expects that all scores, or only logprob and entropy, are bit-identical.
void ExpectSameBits(const FusedScores& a, const FusedScores& b, bool everything = true);

}  // namespace logprobd::testing
