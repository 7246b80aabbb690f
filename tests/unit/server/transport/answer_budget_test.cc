#include "server/transport/answer_budget.h"

#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

using ::testing::HasSubstr;

TEST(AnswerBudgetTest, RefusesAboveItsLimitsUntilAnswersAreReleased) {
  AnswerBudget budget({.bytes_max = 100, .client_share_max = 0.5});
  auto a = budget.Take("a", 40);
  auto b = budget.Take("b", 50);
  EXPECT_EQ(RejectionOf(budget.Take("d", 6, 0.05).status()), Rejection::kInvalid);
  EXPECT_TRUE(budget.Take("d", 5, 0.05).ok());
  ASSERT_TRUE(a.ok() && b.ok());

  const absl::Status client = budget.Take("b", 1).status();
  const absl::Status all = budget.Take("c", 11).status();

  EXPECT_EQ(client.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(RejectionOf(client), Rejection::kAnswerBytes);
  EXPECT_EQ(RetryAfter(client), absl::Milliseconds(100));
  EXPECT_THAT(client.message(),
              HasSubstr("50 bytes are not sent yet, and 1 more would exceed the limit of 50"));
  EXPECT_THAT(all.message(),
              HasSubstr("90 bytes are not sent yet, and 11 more would exceed the limit of 100"));
  b->Release();
  EXPECT_TRUE(budget.Take("b", 50).ok());
}

TEST(AnswerBudgetTest, AllClientsMayTakeTheWholeBudget) {
  AnswerBudget budget({.bytes_max = 100, .client_share_max = 0.5});
  const auto a = budget.Take("a", 50);
  const auto b = budget.Take("b", 40);

  const auto last = budget.Take("c", 10);

  EXPECT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(budget.held_bytes(), 100);
  EXPECT_TRUE(budget.Take("d", 0).ok());  // nothing more
}

TEST(AnswerBudgetTest, ReleasesEachAnswerOfAClientByItself) {
  AnswerBudget budget({.bytes_max = 100, .client_share_max = 0.5});
  auto first = budget.Take("a", 1);
  auto second = budget.Take("a", 40);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(budget.held_bytes(), 41);

  first->Release();
  first->Release();  // does nothing

  EXPECT_EQ(budget.held_bytes(), 40);
  EXPECT_FALSE(budget.Take("a", 11).ok());
  EXPECT_TRUE(budget.Take("a", 10).ok());
  second->Release();
  EXPECT_EQ(budget.held_bytes(), 0);
}

TEST(AnswerBudgetTest, AnswersWithoutBytesAreNotCounted) {
  AnswerBudget budget({.bytes_max = 100, .client_share_max = 0.5});
  {
    const auto first = budget.Take("a", 0);
    const auto second = budget.Take("a", 0);
    EXPECT_TRUE(first.ok() && second.ok());
  }
  EXPECT_EQ(budget.held_bytes(), 0);
}

TEST(AnswerBudgetTest, AClientMayHoldAByteHoweverSmallItsShareIs) {
  AnswerBudget budget({.bytes_max = 1, .client_share_max = 0.5});

  EXPECT_TRUE(budget.Take("a", 1).ok());
  EXPECT_EQ(budget.Take("a", 2).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(AnswerBudgetTest, NewLimitsApplyToLaterAnswersOnly) {
  AnswerBudget budget({.bytes_max = 100, .client_share_max = 1});
  auto held = budget.Take("a", 80);
  ASSERT_TRUE(held.ok());

  budget.SetLimits({.bytes_max = 50, .client_share_max = 0.5});

  EXPECT_EQ(budget.held_bytes(), 80);
  EXPECT_EQ(budget.Take("b", 1).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(budget.Take("b", 26).status().code(), absl::StatusCode::kInvalidArgument);
  held->Release();
  EXPECT_TRUE(budget.Take("b", 25).ok());
}

TEST(AnswerBudgetTest, GivesBackAMovedHoldOnce) {
  AnswerBudget budget({.bytes_max = 100, .client_share_max = 1});
  {
    auto taken = budget.Take("a", 40);
    ASSERT_TRUE(taken.ok());
    AnswerBudget::Hold hold = *std::move(taken);
    EXPECT_EQ(budget.held_bytes(), 40);
    hold = AnswerBudget::Hold();
    EXPECT_EQ(budget.held_bytes(), 0);
  }

  EXPECT_EQ(budget.held_bytes(), 0);
}

TEST(AnswerBudgetTest, RefusesAnAnswerThatCanNeverFit) {
  AnswerBudget budget({.bytes_max = 100, .client_share_max = 0.5});

  const absl::Status status = budget.Take("a", 51).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("51 bytes"));
}

}  // namespace
}  // namespace logprobd
