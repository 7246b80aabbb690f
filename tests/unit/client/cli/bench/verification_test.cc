#include "client/cli/bench/verification.h"

#include <limits>
#include <string>

#include "client/cli/bench/double_reference.h"
#include "client/cli/bench/model_head.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/client/cli/bench/model_case.h"

namespace logprobd::client {
namespace {

class VerificationTest : public ::testing::Test {
 protected:
  VerificationTest() {
    folder_.Write("model.safetensors", SafetensorsOf({CaseWeight(RandomValues(128 * 8, 1))}));
    const ModelHead model = *OpenModelHead(folder_.path(""), head_);
    std::vector<ReferenceRow> rows;
    for (int64_t row = 0; row < 20; ++row) {
      rows.push_back({.hidden = pool_.hidden().data() + row * pool_.row_bytes(),
                      .target = pool_.targets()[static_cast<size_t>(row)]});
    }
    answer_.rows = 20;
    for (const ReferenceScore& score :
         ScoreInDouble(model, head_, Dtype::kBf16, rows, [](double) {})) {
      answer_.logprob.push_back(static_cast<float>(score.logprob));
      answer_.entropy.push_back(static_cast<float>(score.entropy));
    }
  }

  Verification Verify(int64_t sample_rows = 64) {
    const auto found =
        VerifyAnswers(book_, pool_, head_, folder_.path(""), sample_rows, [](double) {});
    EXPECT_TRUE(found.ok()) << found.status();
    return *found;
  }

  TempFolder folder_;
  const Head head_ = CaseHead();
  HeapRowMemory memory_;
  RowPool pool_ = *RowPool::Create(head_, Dtype::kBf16, 20, 1, memory_);
  Baseline book_{pool_.distinct_rows()};
  ScoreResult answer_;  ///< The truth, rounded to fp32.
};

TEST_F(VerificationTest, PassesTheTruth) {
  book_.Add(0, answer_);
  book_.Add(0, answer_);

  const Verification found = Verify();

  EXPECT_TRUE(found.passed());
  EXPECT_EQ(found.rows, 20);
  EXPECT_LT(found.logprob_difference_max, 1e-6);
  EXPECT_GT(found.logprob_difference_max, 0);  // fp32 rounds
  EXPECT_EQ(found.answers_compared, 20);
}

TEST_F(VerificationTest, ComparesNoMoreRowsThanAsked) {
  book_.Add(0, answer_);

  EXPECT_EQ(Verify(/*sample_rows=*/5).rows, 5);
}

TEST_F(VerificationTest, FailsALogprobBeyondTheTolerance) {
  answer_.logprob[3] += 1.5e-4F;
  book_.Add(0, answer_);

  const Verification found = Verify();

  EXPECT_FALSE(found.passed());
  EXPECT_NEAR(found.logprob_difference_max, 1.5e-4, 1e-6);
}

TEST_F(VerificationTest, FailsAnEntropyBeyondTheTolerance) {
  answer_.entropy[3] += 3e-4F;
  book_.Add(0, answer_);

  EXPECT_FALSE(Verify().passed());
}

TEST_F(VerificationTest, FailsANaN) {
  answer_.logprob[3] = std::numeric_limits<float>::quiet_NaN();
  book_.Add(0, answer_);

  EXPECT_FALSE(Verify().passed());
}

TEST_F(VerificationTest, FailsAnAnswerWithOtherBits) {
  book_.Add(0, answer_);
  answer_.logprob[3] += 1e-6F;
  book_.Add(0, answer_);

  const Verification found = Verify();

  EXPECT_FALSE(found.passed());
  EXPECT_EQ(found.answers_different, 1);
  EXPECT_FALSE(found.first_difference.empty());
}

TEST_F(VerificationTest, NeedsAnAnswer) {
  const auto found = VerifyAnswers(book_, pool_, head_, folder_.path(""), 64, [](double) {});

  EXPECT_EQ(found.status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(VerificationTest, NeedsTheModel) {
  book_.Add(0, answer_);

  const auto found = VerifyAnswers(book_, pool_, head_, "/no/such", 64, [](double) {});

  EXPECT_EQ(found.status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace logprobd::client
