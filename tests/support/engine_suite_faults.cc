// Tests that a row with NaN or infinity is reported as nonfinite and affects no other row.

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/kernel_params.h"
#include "tests/support/engine_suite.h"

namespace logprobd::testing {
namespace {

constexpr OutputSet kAllOutputs = OutputSet(kAllOutputBits);
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void SetHidden(EngineCase& inputs, int64_t row, int64_t column, float value) {
  const std::vector<std::byte> bytes = EncodeFloats({value}, inputs.dtype);
  const int64_t index = row * inputs.hidden_size + column;
  std::memcpy(inputs.hidden.data() + index * DtypeBytes(inputs.dtype), bytes.data(), bytes.size());
}

void ExpectNonfiniteRow(const EngineCase& inputs, const EngineScores& scores, size_t row) {
  EXPECT_EQ(scores.nonfinite[row], 1);
  ForEachRowColumn([&]<typename T>(const OutputColumn<T>& column) {
    if constexpr (std::is_same_v<T, float>) {
      EXPECT_TRUE(std::isnan((scores.*column.values)[row])) << column.name;
    } else {
      EXPECT_EQ((scores.*column.values)[row], -1) << column.name;
    }
  });
  const auto top_k = static_cast<size_t>(inputs.top_k);
  for (size_t i = row * top_k; i < (row + 1) * top_k; ++i) {
    EXPECT_EQ(scores.top_k_ids[i], -1);
    EXPECT_TRUE(std::isnan(scores.top_k_logprobs[i]));
  }
  for (size_t i = 0; i < inputs.candidate_ids.size(); ++i) {
    if (inputs.candidate_rows[i] == static_cast<int32_t>(row)) {
      EXPECT_TRUE(std::isnan(scores.candidate_logprobs[i]));
    }
  }
}

TEST_P(EngineSuite, ANonfiniteHiddenRowAffectsNoOtherRow) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const float bad : {kNan, kInfinity, -kInfinity}) {
      SCOPED_TRACE(absl::StrCat(DtypeName(dtype), " ", bad));
      const auto head = MakeRandomHead({.vocab_size = 500, .hidden_size = 70});
      EngineCase clean = MakeRandomCase(*head, 20, dtype);
      clean.top_k = 3;
      for (int32_t row = 0; row < 20; ++row) {
        clean.candidate_rows.push_back(row);
        clean.candidate_ids.push_back(row * 25);
      }
      EngineCase dirty = clean;
      SetHidden(dirty, 0, 69, bad);
      SetHidden(dirty, 9, 0, bad);
      SetHidden(dirty, 19, 33, bad);
      const auto engine = Create(*head);
      ASSERT_NE(engine, nullptr);

      const EngineScores clean_scores = RunCase(*engine, clean);
      const EngineScores dirty_scores = RunCase(*engine, dirty);

      ASSERT_TRUE(dirty_scores.status.ok());
      for (int64_t row = 0; row < 20; ++row) {
        if (row == 0 || row == 9 || row == 19) {
          ExpectNonfiniteRow(dirty, dirty_scores, static_cast<size_t>(row));
        } else {
          EXPECT_EQ(BitsOfRow(dirty, dirty_scores, row, kAllOutputs, true),
                    BitsOfRow(clean, clean_scores, row, kAllOutputs, true))
              << "row " << row;
        }
      }
      EXPECT_TRUE(engine->healthy());
    }
  }
}

/// Returns a small random fp32 head with the given bias, one value per vocabulary id.
std::unique_ptr<InMemoryHead> HeadWithBias(int64_t vocab_size, std::vector<float> bias) {
  HeadInfo info;
  info.hidden_size = 4;
  info.vocab_size = info.vocab_rows = vocab_size;
  info.dtype = Dtype::kF32;
  return std::make_unique<InMemoryHead>(
      info, EncodeFloats(NormalValues(vocab_size * 4, 3), Dtype::kF32), std::move(bias));
}

TEST_P(EngineSuite, ASingleNanOrInfiniteLogitMakesTheRowNonfinite) {
  for (const size_t id : {0U, 17U, 191U, 192U, 300U, 399U}) {
    for (const float bad : {kNan, kInfinity}) {
      SCOPED_TRACE(absl::StrCat("id ", id, " ", bad));
      std::vector<float> bias(400, 0.0F);
      bias[id] = bad;
      const auto head = HeadWithBias(400, bias);
      EngineCase inputs = MakeRandomCase(*head, 3, Dtype::kF32);
      inputs.top_k = 2;
      const auto engine = Create(*head);
      ASSERT_NE(engine, nullptr);

      const EngineScores scores = RunCase(*engine, inputs);

      for (size_t row = 0; row < 3; ++row) ExpectNonfiniteRow(inputs, scores, row);
    }
  }
}

TEST_P(EngineSuite, ARowOfOnlyNegativeInfinityIsNonfinite) {
  const auto head = HeadWithBias(400, std::vector<float>(400, -kInfinity));
  EngineCase inputs = MakeRandomCase(*head, 2, Dtype::kF32);
  inputs.top_k = 2;
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);

  const EngineScores scores = RunCase(*engine, inputs);

  ExpectNonfiniteRow(inputs, scores, 0);
  ExpectNonfiniteRow(inputs, scores, 1);
}

TEST_P(EngineSuite, ANonfiniteBatchDoesNotAffectLaterBatches) {
  const auto head = MakeRandomHead({.vocab_size = 500, .hidden_size = 70});
  const EngineCase clean = MakeRandomCase(*head, 20);
  EngineCase dirty = clean;
  for (int64_t row = 0; row < 20; ++row) SetHidden(dirty, row, row, kNan);
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);
  const EngineScores before = RunCase(*engine, clean);

  RunCase(*engine, dirty);
  const EngineScores after = RunCase(*engine, clean);

  EXPECT_EQ(before.logprob, after.logprob);
  EXPECT_EQ(before.entropy, after.entropy);
}

}  // namespace
}  // namespace logprobd::testing
