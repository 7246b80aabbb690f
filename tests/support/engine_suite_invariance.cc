// Tests that the bits of the scores of a row depend on that row alone.

#include <algorithm>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/engine_suite.h"

namespace logprobd::testing {
namespace {

constexpr OutputSet kAllOutputs = OutputSet(kAllOutputBits);

/// Returns rows that each have their own temperature, entropy temperature and candidates, and a
/// top-k list.
EngineCase MixedCase(const InMemoryHead& head, int64_t num_rows, Dtype dtype) {
  EngineCase inputs = MakeRandomCase(head, num_rows, dtype);
  inputs.top_k = 4;
  for (int64_t row = 0; row < num_rows; ++row) {
    inputs.temperatures[static_cast<size_t>(row)] = 0.5F + 0.25F * static_cast<float>(row % 5);
    inputs.entropy_temperatures.push_back(row % 3 == 0 ? 1.0F : 0.75F);
    for (int64_t i = 0; i < row % 4; ++i) {
      inputs.candidate_rows.push_back(static_cast<int32_t>(row));
      inputs.candidate_ids.push_back(
          static_cast<int32_t>((row * 97 + i * 31) % head.info().vocab_size));
    }
  }
  return inputs;
}

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> rows(static_cast<size_t>(end - begin));
  std::iota(rows.begin(), rows.end(), begin);
  return rows;
}

/// Scores `rows` of `all` in one batch and compares each with its scores in the batch of all rows.
void ExpectSameBits(ScoringEngine& engine, const EngineCase& all, const EngineScores& all_scores,
                    const std::vector<int64_t>& rows) {
  const EngineCase chosen = SelectRows(all, rows);
  const EngineScores scores = RunCase(engine, chosen);
  ASSERT_TRUE(scores.status.ok()) << scores.status;
  for (size_t i = 0; i < rows.size(); ++i) {
    ASSERT_EQ(BitsOfRow(chosen, scores, static_cast<int64_t>(i), kAllOutputs, true),
              BitsOfRow(all, all_scores, rows[i], kAllOutputs, true))
        << "row " << rows[i] << " as row " << i << " of " << rows.size();
  }
}

TEST_P(EngineSuite, ARowHasTheSameBitsInEveryBatch) {
  struct Shape {
    Dtype hidden_dtype;
    Dtype head_dtype;
    int64_t vocab_size;
    int64_t hidden_size;
  };
  for (const Shape shape :
       {Shape{Dtype::kBf16, Dtype::kBf16, 1003, 896}, Shape{Dtype::kBf16, Dtype::kBf16, 385, 77},
        Shape{Dtype::kF32, Dtype::kBf16, 385, 301}, Shape{Dtype::kF16, Dtype::kF16, 500, 264},
        Shape{Dtype::kF32, Dtype::kF32, 500, 264}, Shape{Dtype::kBf16, Dtype::kF32, 200, 130}}) {
    SCOPED_TRACE(absl::StrCat("hidden ", DtypeName(shape.hidden_dtype), ", head ",
                              DtypeName(shape.head_dtype), ", vocab ", shape.vocab_size));
    const auto head = MakeRandomHead({.vocab_size = shape.vocab_size,
                                      .hidden_size = shape.hidden_size,
                                      .dtype = shape.head_dtype,
                                      .logit_stddev = 6});
    const int64_t num_rows = 131;
    const EngineCase all = MixedCase(*head, num_rows, shape.hidden_dtype);
    const auto engine = Create(*head, num_rows);
    ASSERT_NE(engine, nullptr);
    const EngineScores all_scores = RunCase(*engine, all);
    ASSERT_TRUE(all_scores.status.ok()) << all_scores.status;

    for (const int64_t row : {0, 1, 7, 8, 64, 130}) {  // alone
      ExpectSameBits(*engine, all, all_scores, {row});
    }
    for (const int64_t size : {2, 3, 5, 9, 16, 17, 33, 64, 100}) {  // split
      for (int64_t begin = 0; begin < num_rows; begin += size) {
        if (begin > 2 * size && begin + 2 * size < num_rows)
          continue;  // batches at both ends are enough
        ExpectSameBits(*engine, all, all_scores, Range(begin, std::min(begin + size, num_rows)));
      }
    }
    std::vector<int64_t> shuffled = Range(0, num_rows);
    for (size_t i = 0; i < shuffled.size(); ++i) {
      std::swap(shuffled[i], shuffled[(i * 37 + 11) % shuffled.size()]);
    }
    ExpectSameBits(*engine, all, all_scores, shuffled);
    ExpectSameBits(*engine, all, all_scores, Range(0, num_rows));  // repeated
  }
}

TEST_P(EngineSuite, ARowHasTheSameBitsForAnySetOfOutputs) {
  const auto head = MakeRandomHead({.vocab_size = 1003, .hidden_size = 200});
  const EngineCase all = MixedCase(*head, 20, Dtype::kBf16);
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);
  const EngineScores all_scores = RunCase(*engine, all);

  for (uint32_t bits = 1; bits <= kAllOutputBits; bits <<= 1) {
    SCOPED_TRACE(absl::StrCat("outputs ", bits));
    EngineCase one = all;
    one.outputs = OutputSet(bits);
    one.top_k = 0;
    one.candidate_rows.clear();
    one.candidate_ids.clear();

    const EngineScores scores = RunCase(*engine, one);

    for (int64_t row = 0; row < all.num_rows(); ++row) {
      ASSERT_EQ(BitsOfRow(one, scores, row, one.outputs, false),
                BitsOfRow(all, all_scores, row, one.outputs, false))
          << "row " << row;
    }
  }
}

TEST_P(EngineSuite, AnEntropyTemperatureEqualToTheTemperatureChangesNothing) {
  const auto head = MakeRandomHead({.vocab_size = 700, .hidden_size = 96});
  EngineCase plain = MakeRandomCase(*head, 6);
  plain.temperatures = {0.5F, 0.7F, 1.0F, 1.3F, 2.0F, 9.0F};
  EngineCase spelled_out = plain;
  spelled_out.entropy_temperatures = plain.temperatures;
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);

  const EngineScores plain_scores = RunCase(*engine, plain);
  const EngineScores spelled_scores = RunCase(*engine, spelled_out);

  EXPECT_EQ(plain_scores.entropy, spelled_scores.entropy);
  EXPECT_EQ(plain_scores.logprob, spelled_scores.logprob);
}

TEST_P(EngineSuite, TheEntropyTemperatureDoesNotChangeTheLogprob) {
  const auto head = MakeRandomHead({.vocab_size = 700, .hidden_size = 96});
  const EngineCase plain = MakeRandomCase(*head, 6);
  EngineCase other = plain;
  other.entropy_temperatures.assign(6, 0.3F);
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);

  EXPECT_EQ(RunCase(*engine, plain).logprob, RunCase(*engine, other).logprob);
}

TEST_P(EngineSuite, TwoEnginesOfAHeadGiveTheSameBits) {
  const auto head = MakeRandomHead({.vocab_size = 1003, .hidden_size = 200});
  const EngineCase all = MixedCase(*head, 40, Dtype::kBf16);
  const auto small = Create(*head, 40);
  const auto large = Create(*head, 3000);
  ASSERT_NE(small, nullptr);
  ASSERT_NE(large, nullptr);

  const EngineScores small_scores = RunCase(*small, all);
  const EngineScores large_scores = RunCase(*large, all);

  for (int64_t row = 0; row < all.num_rows(); ++row) {
    ASSERT_EQ(BitsOfRow(all, small_scores, row, kAllOutputs, true),
              BitsOfRow(all, large_scores, row, kAllOutputs, true))
        << "row " << row;
  }
}

}  // namespace
}  // namespace logprobd::testing
