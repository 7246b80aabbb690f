// At the size of a real head, the bits of a row do not depend on its batch, and no request takes
// more GPU memory.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/gpu/gpu_engine.h"
#include "tests/gpu/large_head.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kVocabSize = 151'936;
constexpr int64_t kHiddenSize = 1'024;
constexpr int64_t kRowsMax = 8'192;
constexpr OutputSet kAllOutputs = OutputSet(kAllOutputBits);

class GpuInvarianceTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!NoGpuReason().empty()) return;
    head_ = new LargeHead(kVocabSize, kHiddenSize, 3.0);
    auto engine = CreateGpuEngine(*head_, kRowsMax);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = engine->release();
  }
  static void TearDownTestSuite() {
    delete engine_;
    delete head_;
    engine_ = nullptr;
    head_ = nullptr;
  }
  void SetUp() override {
    if (!NoGpuReason().empty()) GTEST_SKIP() << NoGpuReason();
    ASSERT_NE(engine_, nullptr);
  }

  static LargeHead* head_;
  static ScoringEngine* engine_;
};

LargeHead* GpuInvarianceTest::head_ = nullptr;
ScoringEngine* GpuInvarianceTest::engine_ = nullptr;

std::vector<int64_t> Range(int64_t count) {
  std::vector<int64_t> rows(static_cast<size_t>(count));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

void ExpectSameBits(const EngineCase& all, const EngineScores& all_scores, ScoringEngine& engine,
                    const std::vector<int64_t>& rows, bool with_lists) {
  const EngineCase chosen = SelectRows(all, rows);
  const EngineScores scores = RunCase(engine, chosen);
  ASSERT_TRUE(scores.status.ok()) << scores.status;
  for (size_t i = 0; i < rows.size(); ++i) {
    ASSERT_EQ(BitsOfRow(chosen, scores, static_cast<int64_t>(i), all.outputs, with_lists),
              BitsOfRow(all, all_scores, rows[i], all.outputs, with_lists))
        << "row " << rows[i] << " as row " << i << " of " << rows.size();
  }
}

TEST_F(GpuInvarianceTest, ARowHasTheSameBitsAtEveryNumberOfRowsAndInAnyOrder) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32}) {
    // fp32 rows take twice the time (two bf16 splits), so there are fewer of them.
    const int64_t rows_max = dtype == Dtype::kBf16 ? kRowsMax : 1'000;
    EngineCase all = MakeLargeCase(*head_, rows_max, 1);
    if (dtype == Dtype::kF32) {
      all.dtype = dtype;
      all.hidden = EncodeFloats(NormalValues(rows_max * kHiddenSize, 2), dtype);
    }
    all.outputs = kAllOutputs;
    const EngineScores all_scores = RunCase(*engine_, all);
    ASSERT_TRUE(all_scores.status.ok()) << all_scores.status;

    for (const int64_t num_rows : {1, 7, 64, 77, 200, 1'000, 2'500, 4'096, 4'097}) {
      if (num_rows > rows_max) continue;
      SCOPED_TRACE(absl::StrCat(DtypeName(dtype), ", ", num_rows, " rows"));
      ExpectSameBits(all, all_scores, *engine_, Range(num_rows), false);
    }
    std::vector<int64_t> shuffled = Range(rows_max);
    std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937_64(5));
    ExpectSameBits(all, all_scores, *engine_, shuffled, false);
    std::vector<int64_t> last = {rows_max - 1, rows_max / 2, 3};
    ExpectSameBits(all, all_scores, *engine_, last, false);
  }
}

TEST_F(GpuInvarianceTest, TopKAndCandidatesHaveTheSameBitsInAnyBatch) {
  EngineCase all = MakeLargeCase(*head_, 600, 3);
  all.outputs = kAllOutputs;
  all.top_k = 50;
  std::mt19937_64 random(9);
  for (int32_t row = 0; row < 600; ++row) {
    for (int i = 0; i < row % 40; ++i) {
      all.candidate_rows.push_back(row);
      all.candidate_ids.push_back(static_cast<int32_t>(random() % kVocabSize));
    }
  }
  const EngineScores all_scores = RunCase(*engine_, all);
  ASSERT_TRUE(all_scores.status.ok()) << all_scores.status;

  std::vector<int64_t> rows = Range(600);
  std::shuffle(rows.begin(), rows.end(), std::mt19937_64(6));
  ExpectSameBits(all, all_scores, *engine_, rows, true);
  for (const int64_t row : {0, 39, 599}) {
    ExpectSameBits(all, all_scores, *engine_, {row}, true);
  }
}

TEST_F(GpuInvarianceTest, CandidatesInSeveralPassesHaveTheBitsOfTheTarget) {
  EngineCase inputs = MakeLargeCase(*head_, 9, 4);
  for (int32_t row = 0; row < 9; ++row) {  // 9 x 151,936 > 2^20
    for (int32_t id = 0; id < kVocabSize; ++id) {
      inputs.candidate_rows.push_back(row);
      inputs.candidate_ids.push_back(id);
    }
  }

  const EngineScores scores = RunCase(*engine_, inputs);

  ASSERT_TRUE(scores.status.ok()) << scores.status;
  for (int64_t row = 0; row < 9; ++row) {
    const int64_t target = inputs.targets[static_cast<size_t>(row)];
    EXPECT_EQ(scores.candidate_logprobs[static_cast<size_t>(row * kVocabSize + target)],
              scores.logprob[static_cast<size_t>(row)]);
  }
}

TEST_F(GpuInvarianceTest, AThousandRepeatsHaveTheSameBits) {
  const EngineCase inputs = MakeLargeCase(*head_, 40, 5);
  const EngineScores first = RunCase(*engine_, inputs);
  ASSERT_TRUE(first.status.ok()) << first.status;
  for (int repeat = 0; repeat < 1'000; ++repeat) {
    const EngineScores scores = RunCase(*engine_, inputs);
    ASSERT_EQ(scores.logprob, first.logprob) << "repeat " << repeat;
    ASSERT_EQ(scores.entropy, first.entropy) << "repeat " << repeat;
  }
}

TEST_F(GpuInvarianceTest, TwoBatchesInFlightHaveTheBitsOfSingleBatches) {
  const EngineCase large = MakeLargeCase(*head_, kRowsMax, 6);
  const EngineCase small = MakeLargeCase(*head_, 33, 7);
  const EngineScores large_alone = RunCase(*engine_, large);
  const EngineScores small_alone = RunCase(*engine_, small);
  for (int repeat = 0; repeat < 5; ++repeat) {
    StartedCase started_large(*engine_, large);
    StartedCase started_small(*engine_, small);
    ASSERT_EQ(started_large.Wait().logprob, large_alone.logprob);
    ASSERT_EQ(started_small.Wait().logprob, small_alone.logprob);
  }
}

TEST_F(GpuInvarianceTest, NoRequestAllocatesDeviceMemory) {
  RunCase(*engine_, MakeLargeCase(*head_, 1, 8));
  size_t free_before = 0;
  size_t total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_before, &total), cudaSuccess);

  EngineCase large = MakeLargeCase(*head_, kRowsMax, 9);
  large.outputs = kAllOutputs;
  large.top_k = 128;
  large.entropy_temperatures.assign(static_cast<size_t>(kRowsMax), 0.5F);
  const EngineScores scores = RunCase(*engine_, large);

  ASSERT_TRUE(scores.status.ok()) << scores.status;
  size_t free_after = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_after, &total), cudaSuccess);
  EXPECT_GE(free_after + (size_t{2} << 20), free_before);  // tolerance for pages of the driver
  int64_t device_bytes = 0;
  for (const MemoryUse& use : engine_->memory()) {
    if (use.kind == "workspace" && use.place == "gpu0") device_bytes += use.bytes;
  }
  EXPECT_LE(device_bytes, int64_t{512} << 20);
}

}  // namespace
}  // namespace logprobd::testing
