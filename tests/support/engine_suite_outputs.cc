// Top-k, candidates, argmax and greedy, batches in flight, and the engine's description of itself.

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/support/engine_suite.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;

TEST_P(EngineSuite, TopKIsSortedBestFirst) {
  const auto head = MakeRandomHead({.vocab_size = 1500, .hidden_size = 64, .dtype = Dtype::kF32});
  for (const int32_t top_k : {1, 5, 20, 128}) {
    SCOPED_TRACE(absl::StrCat("k ", top_k));
    EngineCase inputs = MakeRandomCase(*head, 9, Dtype::kF32);
    inputs.top_k = top_k;
    ExpectMatchesReference(*head, inputs, tolerances().logprob);
  }
}

TEST_P(EngineSuite, TopKMayCoverTheWholeVocabulary) {
  const auto head = MakeRandomHead({.vocab_size = 20, .hidden_size = 64, .dtype = Dtype::kF32});
  EngineCase inputs = MakeRandomCase(*head, 3, Dtype::kF32);
  inputs.top_k = 20;

  ExpectMatchesReference(*head, inputs, tolerances().logprob);
}

TEST_P(EngineSuite, EntriesOfTopKBeyondTheVocabularyAreEmpty) {
  const auto head = MakeRandomHead({.vocab_size = 3, .hidden_size = 64});
  EngineCase inputs = MakeRandomCase(*head, 2);
  inputs.top_k = 5;
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);

  const EngineScores scores = RunCase(*engine, inputs);

  EXPECT_GE(scores.top_k_ids[2], 0);
  EXPECT_EQ(scores.top_k_ids[3], -1);
  EXPECT_EQ(scores.top_k_ids[4], -1);
  EXPECT_TRUE(std::isnan(scores.top_k_logprobs[3]));
}

/// A head whose weight has value values[c] in every element of column c. With hidden rows of ones,
/// equal values make logits with equal bits.
std::unique_ptr<InMemoryHead> HeadOfColumns(const std::vector<float>& values, int64_t hidden_size) {
  HeadInfo info;
  info.hidden_size = hidden_size;
  info.vocab_size = info.vocab_rows = static_cast<int64_t>(values.size());
  std::vector<float> weight;
  for (const float value : values) {
    weight.insert(weight.end(), static_cast<size_t>(hidden_size), value);
  }
  return std::make_unique<InMemoryHead>(info, EncodeFloats(weight, Dtype::kBf16));
}

EngineCase OnesCase(const InMemoryHead& head, int64_t num_rows) {
  EngineCase inputs = MakeRandomCase(head, num_rows);
  const std::vector<float> ones(static_cast<size_t>(num_rows * head.info().hidden_size), 1.0F);
  inputs.hidden = EncodeFloats(ones, Dtype::kBf16);
  return inputs;
}

TEST_P(EngineSuite, TheLowestIdWinsTies) {
  std::vector<float> values(600, 0.25F);
  for (const size_t id : {70U, 191U, 192U, 400U, 599U}) values[id] = 0.5F;
  const auto head = HeadOfColumns(values, 16);
  EngineCase inputs = OnesCase(*head, 2);
  inputs.top_k = 7;
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);

  const EngineScores scores = RunCase(*engine, inputs);

  EXPECT_EQ(scores.argmax_id[0], 70);
  EXPECT_THAT(std::vector<int32_t>(scores.top_k_ids.begin(), scores.top_k_ids.begin() + 7),
              ElementsAre(70, 191, 192, 400, 599, 0, 1));
  EXPECT_EQ(scores.top_k_logprobs[0], scores.top_k_logprobs[4]);
  EXPECT_EQ(scores.top_k_logprobs[0], scores.argmax_logprob[0]);
}

TEST_P(EngineSuite, TargetCandidateArgmaxAndTopKHaveTheSameBits) {
  const auto head = MakeRandomHead({.vocab_size = 800, .hidden_size = 200});
  EngineCase inputs = MakeRandomCase(*head, 6);
  inputs.top_k = 3;
  for (int32_t row = 0; row < 6; ++row) {
    inputs.candidate_rows.push_back(row);
    inputs.candidate_ids.push_back(inputs.targets[static_cast<size_t>(row)]);
  }
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);

  const EngineScores scores = RunCase(*engine, inputs);

  for (size_t row = 0; row < 6; ++row) {
    EXPECT_EQ(scores.candidate_logprobs[row], scores.logprob[row]);
    EXPECT_EQ(scores.top_k_ids[3 * row], scores.argmax_id[row]);
    EXPECT_EQ(scores.top_k_logprobs[3 * row], scores.argmax_logprob[row]);
  }
}

TEST_P(EngineSuite, AnEqualLogitRanksAboveTheTargetIfItsIdIsLower) {
  std::vector<float> values(600, 0.25F);
  for (const size_t id : {70U, 191U, 192U, 400U, 599U}) values[id] = 0.5F;
  values[5] = 0.0F;
  values[450] = -0.0F;
  const auto head = HeadOfColumns(values, 16);
  EngineCase inputs = OnesCase(*head, 9);
  inputs.targets = {70, 191, 192, 400, 599, 0, 598, 5, 450};
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);

  const EngineScores scores = RunCase(*engine, inputs);

  EXPECT_THAT(scores.target_rank, ElementsAre(0, 1, 2, 3, 4, 5, 597, 598, 599));
}

// The logit of the target is computed before all others, for every dtype in another way. A
// difference in its last bit would make the target rank above or below itself.
TEST_P(EngineSuite, EntryKOfTopKHasTargetRankK) {
  for (const Dtype weight_dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const Dtype hidden_dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      for (const bool transforms : {false, true}) {
        SCOPED_TRACE(absl::StrCat("hidden ", DtypeName(hidden_dtype), ", head ",
                                  DtypeName(weight_dtype), ", transform ", transforms));
        const auto head = MakeRandomHead({.vocab_size = 2'500,
                                          .hidden_size = 203,
                                          .dtype = weight_dtype,
                                          .logit_stddev = 5,
                                          .bias = transforms,
                                          .scale = transforms ? 0.75F : 1.0F,
                                          .softcap = transforms ? 50.0F : 0.0F});
        EngineCase inputs = MakeRandomCase(*head, 150, hidden_dtype);
        inputs.top_k = 60;
        const auto engine = Create(*head, 150);
        ASSERT_NE(engine, nullptr);
        const EngineScores lists = RunCase(*engine, inputs);
        ASSERT_TRUE(lists.status.ok()) << lists.status;
        for (size_t row = 0; row < 150; ++row) {
          inputs.targets[row] = lists.top_k_ids[row * 60 + row % 60];
        }

        const EngineScores scores = RunCase(*engine, inputs);

        for (size_t row = 0; row < 150; ++row) {
          EXPECT_EQ(scores.target_rank[row], static_cast<int32_t>(row % 60)) << "row " << row;
        }
      }
    }
  }
}

TEST_P(EngineSuite, RowsMayHaveDifferentNumbersOfCandidatesAndDuplicates) {
  const auto head = MakeRandomHead({.vocab_size = 800, .hidden_size = 48});
  EngineCase inputs = MakeRandomCase(*head, 6);
  inputs.candidate_rows = {0, 0, 0, 2, 4, 4, 4, 4, 5};
  inputs.candidate_ids = {799, 0, 799, 192, 5, 191, 193, 400, 640};

  ExpectMatchesReference(*head, inputs, tolerances().logprob);
}

TEST_P(EngineSuite, OneRowMayHaveTheWholeVocabularyAsCandidates) {
  const auto head = MakeRandomHead({.vocab_size = 800, .hidden_size = 48});
  EngineCase inputs = MakeRandomCase(*head, 2);
  for (int32_t id = 799; id >= 0; --id) {
    inputs.candidate_rows.push_back(1);
    inputs.candidate_ids.push_back(id);
  }

  ExpectMatchesReference(*head, inputs, tolerances().logprob);
}

TEST_P(EngineSuite, DoesNotWriteScoresThatAreNotRequested) {
  const auto head = MakeRandomHead({.vocab_size = 300, .hidden_size = 48});
  EngineCase inputs = MakeRandomCase(*head, 3);
  inputs.outputs = OutputSet().With(Output::kLse);
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);

  const EngineScores scores = RunCase(*engine, inputs);

  EXPECT_NE(scores.lse[1], kPoison);
  EXPECT_EQ(scores.logprob[1], kPoison);
  EXPECT_EQ(scores.entropy[1], kPoison);
  EXPECT_EQ(scores.argmax_id[1], kPoisonId);
  EXPECT_EQ(scores.max_logit[1], kPoison);
  EXPECT_EQ(scores.target_rank[1], kPoisonId);
  EXPECT_EQ(scores.nonfinite[1], 0);
}

TEST_P(EngineSuite, GreedyAloneGivesTheArgmax) {
  const auto head = MakeRandomHead({.vocab_size = 300, .hidden_size = 48});
  EngineCase inputs = MakeRandomCase(*head, 3);
  inputs.outputs = OutputSet().With(Output::kGreedy);
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);

  const EngineScores scores = RunCase(*engine, inputs);

  EXPECT_EQ(scores.argmax_id[2], ReferenceOf(*head, inputs, 2).argmax_id);
}

TEST_P(EngineSuite, TwoBatchesInFlightEndInOrderWithTheirOwnScores) {
  const auto head = MakeRandomHead({.vocab_size = 2000, .hidden_size = 64});
  const EngineCase first = MakeRandomCase(*head, 60, Dtype::kBf16, 1);
  const EngineCase second = MakeRandomCase(*head, 7, Dtype::kF16, 2);
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);
  const EngineScores first_alone = RunCase(*engine, first);
  const EngineScores second_alone = RunCase(*engine, second);

  StartedCase started_first(*engine, first);
  StartedCase started_second(*engine, second);
  const EngineScores second_scores = started_second.Wait();
  const EngineScores first_scores = started_first.Wait();

  EXPECT_EQ(first_scores.logprob, first_alone.logprob);
  EXPECT_EQ(second_scores.logprob, second_alone.logprob);
  EXPECT_EQ(first_scores.entropy, first_alone.entropy);
  EXPECT_EQ(second_scores.entropy, second_alone.entropy);
}

TEST_P(EngineSuite, DestructionWaitsForTheBatchesInFlight) {
  const auto head = MakeRandomHead({.vocab_size = 4000, .hidden_size = 128});
  const EngineCase inputs = MakeRandomCase(*head, 64);
  auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);

  StartedCase started(*engine, inputs);
  engine.reset();

  EXPECT_TRUE(started.Wait().status.ok());
}

TEST_P(EngineSuite, DescribesHeadMemoryAndLimits) {
  const auto head = MakeRandomHead({.vocab_size = 300, .hidden_size = 48, .padding_rows = 4});
  const auto engine = Create(*head, 40);
  ASSERT_NE(engine, nullptr);

  EXPECT_EQ(engine->info().vocab_size, 300);
  EXPECT_EQ(engine->info().hidden_size, 48);
  EXPECT_EQ(engine->info().name, "test");
  EXPECT_FALSE(engine->info().engine.empty());
  EXPECT_FALSE(engine->info().engine_reason.empty());
  EXPECT_EQ(engine->batch_rows_max(), 40);
  EXPECT_TRUE(engine->healthy());
  int64_t weight_bytes = 0;
  for (const MemoryUse& use : engine->memory()) {
    EXPECT_GT(use.bytes, 0);
    if (use.kind == "weights") weight_bytes += use.bytes;
  }
  EXPECT_GE(weight_bytes, 300 * 48 * 2);
}

TEST_P(EngineSuite, StagingHasTheRequestedSize) {
  const auto head = MakeRandomHead({});
  const auto engine = Create(*head);
  ASSERT_NE(engine, nullptr);

  const auto staging = engine->AllocateStaging(12'345);

  ASSERT_TRUE(staging.ok()) << staging.status();
  EXPECT_GE((*staging)->size_bytes(), 12'345);
  std::fill_n((*staging)->data(), 12'345, std::byte{1});
}

TEST_P(EngineSuite, ReturnsAnErrorOfReadingTheWeight) {
  const auto head = MakeRandomHead({.vocab_size = 5000, .hidden_size = 16});
  head->FailReadsFrom(3000, absl::DataLossError("the file has changed"));

  const auto engine = GetParam().create(*head, 64);

  EXPECT_EQ(engine.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(engine.status().message()), ::testing::HasSubstr("the file has changed"));
}

}  // namespace
}  // namespace logprobd::testing
