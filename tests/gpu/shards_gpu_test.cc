// At the size of a real head, a sharded head has the bits of an unsharded one, and failures between
// GPUs are contained. If the machine has fewer GPUs than shards, several shards share one.

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/gpu/gpu_engine.h"
#include "tests/gpu/large_head.h"
#include "tests/support/engine_case.h"
#include "tests/support/faulty_collective.h"
#include "tests/support/faulty_resources.h"

namespace logprobd::testing {
namespace {

constexpr OutputSet kAllOutputs = OutputSet(kAllOutputBits);

std::unique_ptr<ScoringEngine> Create(const HeadWeights& head, int32_t shards,
                                      EngineOptions options = {}) {
  auto engine = CreateGpuEngine(head, std::move(options), shards);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

/// Rows with all outputs, top-k and candidates. Every second target lies in the first or last
/// column of a tile, where shards start and end.
EngineCase MixedCase(const LargeHead& head, int64_t num_rows, uint64_t seed) {
  EngineCase inputs = MakeLargeCase(head, num_rows, seed);
  const int64_t vocab_size = head.info().vocab_size;
  inputs.outputs = kAllOutputs;
  inputs.top_k = static_cast<int32_t>(std::min<int64_t>(20, vocab_size));
  std::mt19937_64 random(seed);
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto i = static_cast<size_t>(row);
    inputs.temperatures[i] = 0.5F + 0.25F * static_cast<float>(row % 5);
    inputs.entropy_temperatures.push_back(row % 3 == 0 ? 1.0F : 0.75F);
    const auto tile =
        static_cast<int64_t>(random() % static_cast<uint64_t>((vocab_size + 191) / 192));
    if (row % 2 == 0) {
      inputs.targets[i] =
          static_cast<int32_t>(std::min(tile * 192 + (row % 4 == 0 ? 0 : 191), vocab_size - 1));
    }
    for (int64_t k = 0; k < row % 7; ++k) {
      inputs.candidate_rows.push_back(static_cast<int32_t>(row));
      inputs.candidate_ids.push_back(
          static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_size)));
    }
  }
  return inputs;
}

void ExpectSameBits(const EngineCase& all, const EngineScores& all_scores, ScoringEngine& engine,
                    const std::vector<int64_t>& rows) {
  const EngineCase chosen = SelectRows(all, rows);
  const EngineScores scores = RunCase(engine, chosen);
  ASSERT_TRUE(scores.status.ok()) << scores.status;
  for (size_t i = 0; i < rows.size(); ++i) {
    ASSERT_EQ(BitsOfRow(chosen, scores, static_cast<int64_t>(i), all.outputs, true),
              BitsOfRow(all, all_scores, rows[i], all.outputs, true))
        << "row " << rows[i] << " of " << rows.size();
  }
}

std::vector<int64_t> Rows(int64_t begin, int64_t count) {
  std::vector<int64_t> rows;
  for (int64_t row = begin; row < begin + count; ++row) rows.push_back(row);
  return rows;
}

class GpuShardsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!NoGpuReason().empty()) GTEST_SKIP() << NoGpuReason();
  }
};

TEST_F(GpuShardsTest, AnyNumberOfShardsHasTheBitsOfAnUnshardedHead) {
  // A real vocabulary in uneven shards; the largest vocabulary of a known model; eight tiles for
  // eight shards; a last tile of one column.
  for (const int64_t vocab_size : {151'936, 262'208, 8 * 192, 23 * 192 + 1}) {
    const LargeHead head(vocab_size, 1'024, 6.0);
    const EngineCase all = MixedCase(head, 1'300, 7);
    const auto whole = Create(head, 1);
    ASSERT_NE(whole, nullptr);
    const EngineScores all_scores = RunCase(*whole, all);
    ASSERT_TRUE(all_scores.status.ok()) << all_scores.status;

    for (const int32_t shards : {2, 3, 4, 5, 8}) {
      SCOPED_TRACE(absl::StrCat(vocab_size, " columns, ", shards, " shards"));
      const auto engine = Create(head, shards);
      ASSERT_NE(engine, nullptr);
      for (const int64_t rows : {1, 7, 65, 256, 257, 513, 1'300}) {
        ExpectSameBits(all, all_scores, *engine, Rows(1'300 - rows, rows));
      }
    }
  }
}

TEST_F(GpuShardsTest, BothPathsAndAllDtypesHaveTheSameBitsInShards) {
  const LargeHead head(151'936, 896, 3.0);
  EngineOptions options;
  options.kernel = GpuKernel::kChunked;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    EngineCase all = MixedCase(head, 300, 3);
    all.dtype = dtype;
    all.hidden = EncodeFloats(NormalValues(300 * 896, 2), dtype);
    const auto whole = Create(head, 1);
    ASSERT_NE(whole, nullptr);
    const EngineScores all_scores = RunCase(*whole, all);

    for (const int32_t shards : {2, 4}) {
      SCOPED_TRACE(absl::StrCat(DtypeName(dtype), ", ", shards, " shards"));
      const auto fused = Create(head, shards);
      const auto chunked = Create(head, shards, options);
      ASSERT_NE(fused, nullptr);
      ASSERT_NE(chunked, nullptr);
      ExpectSameBits(all, all_scores, *fused, Rows(0, 300));
      ExpectSameBits(all, all_scores, *chunked, Rows(0, 300));
    }
  }
}

TEST_F(GpuShardsTest, NcclHasTheBitsOfPeerMemory) {
  if (NumGpus() < 2) GTEST_SKIP() << "needs two GPUs";  // NCCL cannot use a GPU twice.
  const LargeHead head(151'936, 1'024, 3.0);
  const EngineCase all = MixedCase(head, 1'300, 5);
  const auto whole = Create(head, 1);
  ASSERT_NE(whole, nullptr);
  const EngineScores all_scores = RunCase(*whole, all);
  EngineOptions options;
  options.exchange = Exchange::kNccl;

  for (int32_t shards = 2; shards <= NumGpus(); ++shards) {
    const auto engine = Create(head, shards, options);
    ASSERT_NE(engine, nullptr);
    for (const int64_t rows : {1, 65, 1'300}) {
      ExpectSameBits(all, all_scores, *engine, Rows(0, rows));
    }
  }
}

TEST_F(GpuShardsTest, AThousandBatchesOfRandomRowsHaveTheSameBits) {
  constexpr int64_t kRows = 4'096;
  const LargeHead head(151'936, 1'024, 3.0);
  EngineCase all = MakeLargeCase(head, kRows, 11);
  all.outputs = kAllOutputs;
  std::vector<std::unique_ptr<ScoringEngine>> engines;
  for (const int32_t shards : {1, 2, 4}) {
    engines.push_back(Create(head, shards));
    ASSERT_NE(engines.back(), nullptr);
  }
  const EngineScores all_scores = RunCase(*engines.front(), all);
  ASSERT_TRUE(all_scores.status.ok()) << all_scores.status;
  std::mt19937_64 random(17);

  for (int batch = 0; batch < 500; ++batch) {
    // Two batches are in flight, so that the copies of one overlap the kernels of the other.
    ScoringEngine& engine = *engines[random() % engines.size()];
    EngineCase cases[2];
    std::vector<int64_t> rows[2];
    std::unique_ptr<StartedCase> started[2];
    for (int i = 0; i < 2; ++i) {
      const auto count = static_cast<int64_t>(1 + random() % (1ULL << (random() % 12)));
      rows[i] = Rows(static_cast<int64_t>(random() % static_cast<uint64_t>(kRows - count)), count);
      if (random() % 2 == 0) std::shuffle(rows[i].begin(), rows[i].end(), random);
      cases[i] = SelectRows(all, rows[i]);
      started[i] = std::make_unique<StartedCase>(engine, cases[i]);
    }
    for (int i = 0; i < 2; ++i) {
      const EngineScores scores = started[i]->Wait();
      ASSERT_TRUE(scores.status.ok()) << scores.status;
      for (size_t row = 0; row < rows[i].size(); ++row) {
        ASSERT_EQ(BitsOfRow(cases[i], scores, static_cast<int64_t>(row), all.outputs, false),
                  BitsOfRow(all, all_scores, rows[i][row], all.outputs, false))
            << "batch " << batch << ", row " << row << " of " << rows[i].size();
      }
    }
  }
  const std::vector<int64_t> sample = {0, 1'777, kRows - 1};
  const std::vector<std::vector<double>> logits = LargeLogitsReference(head, all, sample);
  for (size_t i = 0; i < sample.size(); ++i) {
    const auto row = static_cast<size_t>(sample[i]);
    kernels::RowQuestion question;
    question.target = all.targets[row];
    const kernels::RowReference truth = kernels::ScoreRowReference(logits[i], question);
    EXPECT_NEAR(all_scores.logprob[row], truth.logprob, 1e-4);
    EXPECT_NEAR(all_scores.entropy[row], truth.entropy, 2e-4);
  }
}

// E79: the exchange of a rank fails, or a rank never arrives while kernels of the others wait for
// it.
TEST_F(GpuShardsTest, ARankThatFailsOrHangsEndsItsReplicaOnly) {
  const LargeHead head(20'000, 512, 3.0);
  const EngineCase inputs = MixedCase(head, 700, 3);
  const auto other = Create(head, 2);
  ASSERT_NE(other, nullptr);
  const EngineScores expected = RunCase(*other, inputs);
  struct Case {
    FaultyCollective::Fault fault;
    Exchange exchange;
  };
  std::vector<Case> cases;
  for (const auto fault : {FaultyCollective::Fault::kFails, FaultyCollective::Fault::kHangs,
                           FaultyCollective::Fault::kIsLater}) {
    cases.push_back({fault, Exchange::kPeer});
    if (NumGpus() > 1) cases.push_back({fault, Exchange::kNccl});  // NCCL cannot use a GPU twice
  }
  for (const auto [fault, exchange] : cases) {
    for (const int32_t rank : {0, 1}) {
      SCOPED_TRACE(absl::StrCat("fault ", static_cast<int>(fault), ", rank ", rank, ", NCCL ",
                                exchange == Exchange::kNccl));
      FaultyResources resources;
      EngineOptions options;
      options.exchange = exchange;
      options.batch_time_max = absl::Seconds(1);
      options.resources = &resources;
      resources.collective = [&](std::unique_ptr<Collective> real) {
        return std::make_unique<FaultyCollective>(std::move(real), fault, rank, 1);
      };
      const auto engine = Create(head, 2, options);
      ASSERT_NE(engine, nullptr);

      const EngineScores failed = RunCase(*engine, inputs);
      const EngineScores later = RunCase(*engine, inputs);
      const EngineScores others = RunCase(*other, inputs);

      EXPECT_EQ(absl::IsUnavailable(failed.status), fault == FaultyCollective::Fault::kHangs)
          << failed.status;
      EXPECT_FALSE(failed.status.ok());
      EXPECT_TRUE(absl::IsUnavailable(later.status)) << later.status;
      EXPECT_FALSE(engine->healthy());
      EXPECT_TRUE(others.status.ok()) << others.status;
      EXPECT_EQ(others.logprob, expected.logprob);
    }
  }
}

TEST_F(GpuShardsTest, CandidatesInSeveralPassesHaveTheSameBitsInShards) {
  const LargeHead head(20'000, 512, 3.0);
  EngineCase inputs = MixedCase(head, 40, 3);
  inputs.candidate_rows.clear();
  inputs.candidate_ids.clear();
  std::mt19937_64 random(3);
  for (int32_t i = 0; i < (1 << 20) + 5'000; ++i) {  // more candidates than one pass takes
    inputs.candidate_rows.push_back(i / 26'500);
    inputs.candidate_ids.push_back(static_cast<int32_t>(random() % 20'000));
  }
  const auto whole = Create(head, 1);
  const auto shards = Create(head, 3);
  ASSERT_NE(whole, nullptr);
  ASSERT_NE(shards, nullptr);

  const EngineScores expected = RunCase(*whole, inputs);
  const EngineScores scores = RunCase(*shards, inputs);

  ASSERT_TRUE(scores.status.ok()) << scores.status;
  EXPECT_EQ(scores.candidate_logprobs, expected.candidate_logprobs);
  EXPECT_EQ(scores.logprob, expected.logprob);
  EXPECT_EQ(scores.top_k_ids, expected.top_k_ids);
}

// E76: if a shard of any rank has no memory for a batch, only that batch fails.
TEST_F(GpuShardsTest, AShardWithoutMemoryFailsOnlyThatBatch) {
  const LargeHead head(20'000, 512, 3.0);
  const EngineCase inputs = MixedCase(head, 700, 3);
  int32_t short_rank = -1;
  FaultyResources resources;
  EngineOptions options;
  options.resources = &resources;
  resources.memory = [&](int32_t shard, absl::string_view what) {
    return shard == short_rank && what == "batch"
               ? absl::ResourceExhaustedError("no memory for a batch")
               : absl::OkStatus();
  };
  const auto engine = Create(head, 3, options);
  ASSERT_NE(engine, nullptr);
  const EngineScores before = RunCase(*engine, inputs);

  for (const int32_t rank : {0, 1, 2}) {
    short_rank = rank;
    const EngineScores failed = RunCase(*engine, inputs);
    short_rank = -1;
    const EngineScores after = RunCase(*engine, inputs);

    EXPECT_EQ(failed.status, absl::ResourceExhaustedError("no memory for a batch"));
    EXPECT_TRUE(engine->healthy());
    EXPECT_EQ(after.logprob, before.logprob);
    EXPECT_EQ(after.top_k_ids, before.top_k_ids);
  }
}

}  // namespace
}  // namespace logprobd::testing
