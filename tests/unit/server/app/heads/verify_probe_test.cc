#include "server/app/heads/verify_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/reference/row_reference.h"
#include "server/engine/kernel_params.h"
#include "tests/support/in_memory_head.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::atomic<bool> never_stop = false;

class VerifyProbeTest : public ::testing::TestWithParam<Dtype> {};

TEST_P(VerifyProbeTest, ScalesLogitsToAStandardDeviationOfAboutThree) {
  for (const float scale : {1.0F, 0.0625F, 40.0F}) {
    const auto head = testing::MakeRandomHead({.vocab_size = 700,
                                               .hidden_size = 96,
                                               .padding_rows = 20,
                                               .dtype = GetParam(),
                                               .scale = scale});
    const auto probe = MakeVerifyProbe(*head, {.rows = 20, .seed = 5});
    ASSERT_TRUE(probe.ok()) << probe.status();

    const auto truth = ScoreVerifyProbe(*head, *probe, never_stop);

    ASSERT_TRUE(truth.ok()) << truth.status();
    EXPECT_GT(truth->logit_stddev, 2.5) << scale;
    EXPECT_LT(truth->logit_stddev, 3.5) << scale;
  }
}

TEST_P(VerifyProbeTest, ScoresLikeTheReference) {
  const auto head = testing::MakeRandomHead({.vocab_size = 401,
                                             .hidden_size = 36,
                                             .padding_rows = 7,
                                             .dtype = GetParam(),
                                             .bias = true,
                                             .scale = 0.5F,
                                             .softcap = 30});
  const auto probe = MakeVerifyProbe(*head, {.rows = 18, .seed = 2});
  ASSERT_TRUE(probe.ok()) << probe.status();

  const auto truth = ScoreVerifyProbe(*head, *probe, never_stop);

  ASSERT_TRUE(truth.ok()) << truth.status();
  for (int64_t row = 0; row < 18; ++row) {
    const std::byte* hidden = probe->hidden.data() + row * 36 * DtypeBytes(GetParam());
    const kernels::Dtype dtype = KernelDtype(GetParam());
    const std::vector<double> logits = kernels::LogitsReference(
        hidden, dtype, head->weight(), dtype, 401, 36, {.scale = 0.5F, .softcap = 30},
        std::span<const float>(head->bias()).first(401));
    kernels::RowQuestion question;
    question.target = probe->targets[static_cast<size_t>(row)];
    const kernels::RowReference expected = kernels::ScoreRowReference(logits, question);
    EXPECT_NEAR(truth->logprob[static_cast<size_t>(row)], expected.logprob, 1e-10);
    EXPECT_NEAR(truth->entropy[static_cast<size_t>(row)], expected.entropy, 1e-10);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, VerifyProbeTest,
                         ::testing::Values(Dtype::kBf16, Dtype::kF16, Dtype::kF32),
                         [](const auto& param_info) {
                           return std::string(DtypeName(param_info.param));
                         });

TEST(VerifyProbeTest, SpreadsTargetsFromTheFirstIdToTheLast) {
  const auto head = testing::MakeRandomHead({.vocab_size = 101, .hidden_size = 4});

  EXPECT_THAT(MakeVerifyProbe(*head, {.rows = 5})->targets, ElementsAre(0, 25, 50, 75, 100));
  EXPECT_THAT(MakeVerifyProbe(*head, {.rows = 1})->targets, ElementsAre(0));
}

TEST(VerifyProbeTest, DependsOnlyOnTheSeed) {
  const auto head = testing::MakeRandomHead({.vocab_size = 50, .hidden_size = 16});

  const auto probe = MakeVerifyProbe(*head, {.rows = 2, .seed = 1});

  EXPECT_EQ(probe->hidden, MakeVerifyProbe(*head, {.rows = 2, .seed = 1})->hidden);
  EXPECT_NE(probe->hidden, MakeVerifyProbe(*head, {.rows = 2, .seed = 2})->hidden);
}

TEST(VerifyProbeTest, WorksOnAWeightOfZeros) {
  HeadInfo info;
  info.hidden_size = 4;
  info.vocab_size = info.vocab_rows = 10;
  info.dtype = Dtype::kF32;
  const testing::InMemoryHead head(info, std::vector<std::byte>(160));
  const auto probe = MakeVerifyProbe(head, {.rows = 1});
  ASSERT_TRUE(probe.ok());

  const auto truth = ScoreVerifyProbe(head, *probe, never_stop);

  ASSERT_TRUE(truth.ok());
  EXPECT_NEAR(truth->entropy[0], std::log(10), 1e-12);
  EXPECT_EQ(truth->logit_stddev, 0);
}

TEST(VerifyProbeTest, StopsOnRequest) {
  const auto head = testing::MakeRandomHead({.vocab_size = 50, .hidden_size = 16});
  const auto probe = MakeVerifyProbe(*head, {.rows = 2});
  const std::atomic<bool> stop = true;

  EXPECT_TRUE(absl::IsCancelled(ScoreVerifyProbe(*head, *probe, stop).status()));
}

TEST(VerifyProbeTest, ReportsAWeightThatCannotBeRead) {
  const auto head = testing::MakeRandomHead({.vocab_size = 500, .hidden_size = 16});
  const auto probe = MakeVerifyProbe(*head, {.rows = 2});
  head->FailReadsFrom(400, absl::DataLossError("the file has changed"));

  EXPECT_TRUE(absl::IsDataLoss(ScoreVerifyProbe(*head, *probe, never_stop).status()));
  EXPECT_TRUE(absl::IsDataLoss(MakeVerifyProbe(*head, {.rows = 2}).status()));
}

// Regression: a NaN in the weight made Verify report that the engine's numbers were wrong.
TEST(VerifyProbeTest, NamesTheValueOfAWeightThatIsNotFinite) {
  const auto made =
      testing::MakeRandomHead({.vocab_size = 300, .hidden_size = 16, .dtype = Dtype::kF32});
  std::vector<std::byte> weight(made->weight(), made->weight() + made->info().weight_bytes);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(&weight[(250 * 16 + 3) * sizeof(float)], &nan, sizeof(nan));
  const testing::InMemoryHead head(made->info(), std::move(weight));
  const auto probe = MakeVerifyProbe(head, {.rows = 2});
  ASSERT_TRUE(probe.ok()) << probe.status();

  const auto truth = ScoreVerifyProbe(head, *probe, never_stop);

  EXPECT_EQ(truth.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(truth.status().message(), HasSubstr("row 250 column 3 is NaN or Inf"));
}

TEST(VerifyProbeTest, NamesTheRowOfABiasThatIsNotFinite) {
  const auto made = testing::MakeRandomHead({.vocab_size = 300, .hidden_size = 16, .bias = true});
  std::vector<float> bias = made->bias();
  bias[299] = -std::numeric_limits<float>::infinity();
  const std::vector<std::byte> weight(made->weight(), made->weight() + made->info().weight_bytes);
  const testing::InMemoryHead head(made->info(), weight, bias);
  const auto probe = MakeVerifyProbe(head, {.rows = 2});
  ASSERT_TRUE(probe.ok()) << probe.status();

  const auto truth = ScoreVerifyProbe(head, *probe, never_stop);

  EXPECT_EQ(truth.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(truth.status().message(), HasSubstr("the bias of row 299 is NaN or Inf"));
}

TEST(CompareWithTruthTest, PassesDifferencesUpToTheTolerances) {
  const VerifyTruth truth = {{-1, -2}, {3, 4}, 3};

  const VerifyReport near = CompareWithTruth(truth, {-1.00005F, -2}, {3, 4.0001F});
  EXPECT_TRUE(near.passed);
  EXPECT_EQ(near.rows, 2);
  EXPECT_NEAR(near.logprob_difference_max, 5e-5, 1e-6);
  EXPECT_NEAR(near.entropy_difference_max, 1e-4, 1e-6);

  EXPECT_FALSE(CompareWithTruth(truth, {-1.0002F, -2}, {3, 4}).passed);
  EXPECT_FALSE(CompareWithTruth(truth, {-1, -2}, {3, 4.0004F}).passed);
}

TEST(CompareWithTruthTest, FailsOnNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const VerifyTruth truth = {{-1}, {3}, 3};

  EXPECT_FALSE(CompareWithTruth(truth, {nan}, {3}).passed);
  EXPECT_FALSE(CompareWithTruth(truth, {-1}, {nan}).passed);
}

}  // namespace
}  // namespace logprobd
