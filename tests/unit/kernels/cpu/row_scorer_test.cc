#include "kernels/cpu/row_scorer.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/common/tile.h"
#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/thread_pool.h"

namespace logprobd::kernels {
namespace {

constexpr int64_t kRows = 300;
constexpr int64_t kVocab = 1000;  // the last tile has 40 columns

struct Freed {
  void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{64}); }
};

/// Returns the bits of `value`, rounded towards zero where the type has fewer.
uint32_t Encode(float value, Dtype dtype) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  if (dtype == Dtype::kF32) return bits;
  if (dtype == Dtype::kBf16) return bits >> 16;
  return ((bits >> 16) & 0x8000U) | (((bits >> 13) & 0x3FFFFU) - (112U << 10));
}

/// Returns `count` values of magnitude 1/8 to 2 that use all bits of their type.
std::vector<std::byte> Values(Dtype dtype, int64_t count, uint32_t seed) {
  const auto size = static_cast<size_t>(DtypeBytes(dtype));
  std::vector<std::byte> bytes(static_cast<size_t>(count) * size);
  uint32_t state = seed;
  for (size_t i = 0; i < bytes.size(); i += size) {
    state = state * 1664525U + 1013904223U;
    const float magnitude = 0.125F + static_cast<float>(state >> 9) * (1.875F / 8388608.0F);
    const uint32_t bits = Encode((state & 256U) != 0 ? magnitude : -magnitude, dtype);
    std::memcpy(&bytes[i], &bits, size);
  }
  return bytes;
}

/// A head whose rows lie apart in memory, the same head packed, and rows to score.
struct Case {
  Case(Dtype hidden_type, Dtype weight_type, int64_t size)
      : hidden_dtype(hidden_type), hidden(Values(hidden_type, kRows * size, 1)) {
    const int64_t stride = size + 3;
    weight = Values(weight_type, kVocab * stride, 2);
    strided = {.dtype = weight_type,
               .hidden_size = size,
               .vocab_size = kVocab,
               .tile_end = NumTiles(kVocab),
               .transform = {.scale = 0.1F, .softcap = 20.0F}};
    packed = strided;
    strided.strided_weight = {weight.data(), stride};
    tiles.reset(static_cast<std::byte*>(::operator new (
        static_cast<size_t>(PackedWeightBytes(weight_type, size, kVocab)), std::align_val_t{64})));
    packed.packed_weight = tiles.get();
    for (int64_t tile = 0; tile < packed.tile_end; ++tile) {
      const int64_t first = tile * kTileColumns;
      PackTile(weight_type, strided.strided_weight.From(weight_type, first, 0),
               std::min<int64_t>(kTileColumns, kVocab - first), size,
               tiles.get() + tile * PackedTileBytes(weight_type, size));
    }
  }

  Dtype hidden_dtype;
  std::vector<std::byte> hidden;
  std::vector<std::byte> weight;
  std::unique_ptr<std::byte, Freed> tiles;
  CpuHead strided;
  CpuHead packed;
};

/// Scores of a batch, and the parameters that write them.
struct Scores {
  explicit Scores(const Case& given, int64_t num_rows = kRows)
      : targets(static_cast<size_t>(num_rows)),
        temperatures(targets.size(), 0.7F),
        logprob(targets.size()),
        entropy(targets.size()),
        lse(targets.size()),
        lse_rest(targets.size()),
        nonfinite(targets.size()) {
    for (size_t row = 0; row < targets.size(); ++row) {
      targets[row] = static_cast<int32_t>(row * 7919 % kVocab);
    }
    params.hidden_dtype = given.hidden_dtype;
    params.hidden = given.hidden.data();
    params.num_rows = num_rows;
    params.targets = targets.data();
    params.temperatures = temperatures.data();
    params.logprob = logprob.data();
    params.entropy = entropy.data();
    params.lse = lse.data();
    params.lse_rest = lse_rest.data();
    params.nonfinite = nonfinite.data();
  }

  /// Returns the scores of the first `num_rows` rows, one score after another.
  std::vector<float> First(int64_t num_rows) const {
    std::vector<float> values;
    for (const auto* score : {&logprob, &entropy, &lse, &lse_rest}) {
      values.insert(values.end(), score->begin(), score->begin() + num_rows);
    }
    return values;
  }

  std::vector<int32_t> targets;
  std::vector<float> temperatures;
  std::vector<float> logprob, entropy, lse, lse_rest;
  std::vector<uint8_t> nonfinite;
  ScoreRowsParams params;
};

class RowScorerTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!CpuIsaRuns(GetParam())) GTEST_SKIP() << "this CPU has no " << CpuIsaName(GetParam());
  }
  RowScorer::Options Options(int32_t num_threads) const {
    return {.isa = GetParam(), .num_threads = num_threads, .batch_rows_max = kRows};
  }
};

INSTANTIATE_TEST_SUITE_P(All, RowScorerTest, ::testing::ValuesIn(kAllCpuIsas),
                         [](const auto& info) { return std::string(CpuIsaName(info.param)); });

TEST_P(RowScorerTest, AStridedWeightGivesTheBitsOfThePackedOne) {
  for (const Dtype hidden : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const Dtype weight : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      for (const int64_t size : {1, 40, 128, 255, 256, 515}) {  // chunks have 128 or 256 elements
        SCOPED_TRACE(::testing::Message() << "dtypes " << static_cast<int>(hidden) << ", "
                                          << static_cast<int>(weight) << ", hidden size " << size);
        const Case given(hidden, weight, size);
        Scores expected(given);
        RowScorer(given.packed, Options(1)).Score(expected.params);
        for (const int64_t num_rows : {int64_t{1}, int64_t{3}, kRows}) {
          Scores ours(given, num_rows);

          RowScorer(given.strided, Options(2)).Score(ours.params);

          ASSERT_EQ(ours.First(num_rows), expected.First(num_rows)) << num_rows << " rows";
        }
      }
    }
  }
}

/// Runs loops backwards on the calling thread.
class BackwardThreads : public LoopThreads {
 public:
  int32_t num_threads() const override { return 3; }
  void ForEach(int64_t num_units, const std::function<void(int64_t, int32_t)>& body) override {
    for (int64_t unit = num_units - 1; unit >= 0; --unit)
      body(unit, static_cast<int32_t>(unit % 3));
  }
};

TEST_P(RowScorerTest, UsesTheThreadsOfTheCaller) {
  const Case given(Dtype::kF32, Dtype::kF32, 40);
  Scores expected(given);
  Scores ours(given);
  BackwardThreads threads;

  RowScorer(given.strided, Options(1)).Score(expected.params);
  RowScorer(given.strided, Options(3), threads).Score(ours.params);

  EXPECT_EQ(ours.First(kRows), expected.First(kRows));
}

TEST_P(RowScorerTest, ABatchOfSeveralStepsGetsTheBitsOfOneStep) {
  const Case given(Dtype::kBf16, Dtype::kBf16, 40);
  RowScorer::Options few = Options(2);
  few.batch_rows_max = 16;
  RowScorer of_several(given.packed, few);
  ASSERT_LT(of_several.step_rows(), kRows / 2);
  std::vector<float> entropy_temperatures;
  for (int64_t row = 0; row < kRows; ++row) {
    entropy_temperatures.push_back(0.5F + 0.01F * static_cast<float>(row));
  }
  std::vector<std::vector<float>> scores;
  std::vector<std::vector<int32_t>> ranks;

  for (const bool is_one : {true, false}) {
    Scores of(given);
    std::vector<int32_t> rank(kRows);
    std::reverse_copy(entropy_temperatures.begin(), entropy_temperatures.end(),
                      of.temperatures.begin());
    of.params.entropy_temperatures = entropy_temperatures.data();
    of.params.target_rank = rank.data();
    if (is_one) {
      RowScorer(given.packed, Options(2)).Score(of.params);
    } else {
      of_several.Score(of.params);
    }
    scores.push_back(of.First(kRows));
    ranks.push_back(rank);
  }

  EXPECT_EQ(scores[0], scores[1]);
  EXPECT_EQ(ranks[0], ranks[1]);
}

/// Scores a row against a head whose weight and bias are constant, and whose scale is `scale`.
struct ConstantScores {
  ConstantScores(const RowScorer::Options& options, LoopThreads& threads, float hidden,
                 float weight, float scale, float bias) {
    const std::vector<float> weights(kVocab, weight);
    const std::vector<float> biases(static_cast<size_t>(NumTiles(kVocab) * kTileColumns), bias);
    const CpuHead head = {.strided_weight = {weights.data(), 1},
                          .dtype = Dtype::kF32,
                          .hidden_size = 1,
                          .vocab_size = kVocab,
                          .tile_end = NumTiles(kVocab),
                          .transform = {.scale = scale},
                          .bias = biases.data()};
    const int32_t target = 0;
    const float temperature = 1;
    uint8_t nonfinite = 0;
    ScoreRowsParams params;
    params.hidden_dtype = Dtype::kF32;
    params.hidden = &hidden;
    params.num_rows = 1;
    params.targets = &target;
    params.temperatures = &temperature;
    params.argmax_id = &argmax_id;
    params.max_logit = &max_logit;
    params.min_logit = &min_logit;
    params.nonfinite = &nonfinite;
    RowScorer(head, options, threads).Score(params);
  }

  int32_t argmax_id = -1;
  float max_logit = 0;
  float min_logit = 0;
};

TEST_P(RowScorerTest, TheLowestOfEqualLogitsIsTheArgmaxInWhateverOrderTheTilesAreScored) {
  ThreadPool forwards(1);
  BackwardThreads backwards;

  EXPECT_EQ(ConstantScores(Options(1), forwards, 1, 1, 1, 0).argmax_id, 0);
  EXPECT_EQ(ConstantScores(Options(3), backwards, 1, 1, 1, 0).argmax_id, 0);
}

// The scores of shards do not tell -0 from 0.
TEST_P(RowScorerTest, AnExtremeLogitOfMinusZeroIsZero) {
  constexpr float kTiny = 0x1p-60F;
  ThreadPool threads(1);

  // The product of hidden, weight and scale underflows to -0.
  const ConstantScores scores(Options(1), threads, -kTiny, kTiny, kTiny, -0.0F);

  EXPECT_EQ(scores.max_logit, 0);
  EXPECT_FALSE(std::signbit(scores.max_logit));
  EXPECT_FALSE(std::signbit(scores.min_logit));
}

TEST_P(RowScorerTest, VisitsEveryLogitOnce) {
  const Case given(Dtype::kBf16, Dtype::kBf16, 40);
  Scores scores(given);
  std::mutex mutex;
  std::vector<float> logits(kRows * kVocab, std::numeric_limits<float>::quiet_NaN());
  scores.params.visit_logits = [&](const TileLogits& tile) {
    const std::lock_guard lock(mutex);
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      for (int64_t column = 0; column < tile.num_columns; ++column) {
        float& logit = logits[static_cast<size_t>((tile.row_begin + row) * kVocab +
                                                  tile.first_column + column)];
        EXPECT_NE(logit, logit) << "visited twice";
        logit = tile.logits[row * kTileColumns + column];
      }
    }
  };

  RowScorer(given.strided, Options(2)).Score(scores.params);

  for (size_t row = 0; row < kRows; ++row) {
    double sum = 0;
    for (size_t column = 0; column < kVocab; ++column) {
      sum += std::exp(static_cast<double>(logits[row * kVocab + column]) / 0.7);
    }
    const auto target = static_cast<size_t>(scores.targets[row]);
    EXPECT_NEAR(scores.lse[row], std::log(sum), 1e-5);
    EXPECT_NEAR(scores.logprob[row],
                static_cast<double>(logits[row * kVocab + target]) / 0.7 - std::log(sum), 1e-5);
  }
}

}  // namespace
}  // namespace logprobd::kernels
