#include "server/batching/row_queue.h"

#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/test_requests.h"

namespace logprobd::testing {
namespace {

class RowQueueTest : public ::testing::Test {
 protected:
  std::shared_ptr<PendingRequest> Push(const RequestSpec& spec) {
    auto pending = std::make_shared<PendingRequest>();
    pending->request = MakeRequest(spec);
    pending->CountRows();
    queue_.Push(pending);
    return pending;
  }

  static BatchBudget Budget(int64_t rows) {
    return {.rows_max = rows, .rows_max_f32 = rows, .bulk_rows_max = rows};
  }

  RowQueue queue_;
};

TEST_F(RowQueueTest, TakesRowsInTheOrderOfTheirRequests) {
  const auto first = Push({.rows = 3});
  const auto second = Push({.rows = 3});

  const std::vector<BatchPart> parts = queue_.Cut(Budget(4));

  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].pending, first);
  EXPECT_EQ(parts[0].num_rows, 3);
  EXPECT_EQ(parts[1].pending, second);
  EXPECT_EQ(parts[1].batch_row, 3);
  EXPECT_EQ(parts[1].num_rows, 1);
  EXPECT_FALSE(first->is_queued);
  EXPECT_TRUE(second->is_queued);
  EXPECT_EQ(queue_.rows(), 2);
}

TEST_F(RowQueueTest, GivesARequestOnePartHoweverManyTurnsItTook) {
  Push({.rows = 100, .client_id = "a"});
  Push({.rows = 100, .client_id = "b"});

  const std::vector<BatchPart> parts = queue_.Cut(Budget(64));

  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].num_rows, 32);
  EXPECT_EQ(parts[1].num_rows, 32);
  EXPECT_EQ(parts[1].batch_row, 32);
  EXPECT_TRUE(parts[0].is_contiguous());
}

// Regression: turns of a quarter of the rows split the requests of most clients into two batches.
TEST_F(RowQueueTest, TurnsStayAsLongWhenABatchTakesFewerRowsThanFit) {
  for (const char* client : {"a", "b", "c", "d", "e"}) Push({.rows = 60, .client_id = client});
  BatchBudget budget = Budget(8'192);
  budget.taken_rows_max = 256;

  const std::vector<BatchPart> parts = queue_.Cut(budget);

  ASSERT_EQ(parts.size(), 5U);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(parts[i].num_rows, 60);
  EXPECT_EQ(parts[4].num_rows, 16);
}

TEST_F(RowQueueTest, ALowerPriorityEarnsAShareOfWhatABatchTakes) {
  Push({.rows = 300, .priority = Priority::kHigh});
  Push({.rows = 300, .priority = Priority::kLow});
  BatchBudget budget = Budget(8'192);
  budget.taken_rows_max = 256;

  const std::vector<BatchPart> parts = queue_.Cut(budget);

  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].num_rows, 240);
  EXPECT_EQ(parts[1].num_rows, 16);
}

// Rows of another dtype than a flood of a higher priority earn a whole batch in 16 batches. Here
// the request that earned most of it is cancelled.
TEST_F(RowQueueTest, TheCreditOfACancelledRequestIsLost) {
  const auto cancelled = Push({.rows = 16, .dtype = Dtype::kF32, .priority = Priority::kLow});
  Push({.rows = 1'000, .priority = Priority::kHigh});
  for (int i = 0; i < 15; ++i) queue_.Cut(Budget(16));

  queue_.Remove(*cancelled);
  queue_.Cut(Budget(16));
  Push({.rows = 16, .dtype = Dtype::kF32, .priority = Priority::kLow});
  std::vector<Dtype> dtypes;
  for (int i = 0; i < 16; ++i) {
    dtypes.push_back(queue_.Cut(Budget(16)).at(0).pending->request.dtype());
  }

  std::vector<Dtype> expected(15, Dtype::kBf16);
  expected.push_back(Dtype::kF32);  // after 16 batches of its own
  EXPECT_EQ(dtypes, expected);
}

TEST_F(RowQueueTest, SkipsIgnoredRowsAndDoesNotCountThem) {
  Push({.rows = 8, .ignored_rows = {0, 2, 3, 6, 7}});
  EXPECT_EQ(queue_.rows(), 3);

  const std::vector<BatchPart> first = queue_.Cut(Budget(2));
  const std::vector<BatchPart> second = queue_.Cut(Budget(2));

  ASSERT_EQ(first.size(), 1U);
  EXPECT_EQ(first[0].row_begin, 1);
  EXPECT_EQ(first[0].row_end, 5);
  EXPECT_EQ(first[0].num_rows, 2);
  ASSERT_EQ(second.size(), 1U);
  EXPECT_EQ(second[0].row_begin, 5);
  EXPECT_EQ(second[0].num_rows, 1);
  EXPECT_TRUE(queue_.empty());
  EXPECT_EQ(queue_.rows(), 0);
}

TEST_F(RowQueueTest, RemovesARequestThatWasPartlyCut) {
  const auto pending = Push({.rows = 300});
  const auto other = Push({.rows = 1, .client_id = "other"});
  queue_.Cut(Budget(1));

  queue_.Remove(*pending);

  EXPECT_EQ(queue_.rows(), 1);
  EXPECT_EQ(queue_.ClientRows("client", Priority::kNormal, false), 0);
  EXPECT_EQ(queue_.Oldest(), other.get());
  queue_.Remove(*other);
  EXPECT_TRUE(queue_.empty());
  EXPECT_FALSE(queue_.has_small());
}

TEST_F(RowQueueTest, TakesNoMoreRowsOfLargeRequestsThanTheirBudget) {
  Push({.rows = 1'000, .client_id = "a"});
  Push({.rows = 1'000, .client_id = "b"});
  Push({.rows = 100, .client_id = "c"});

  const std::vector<BatchPart> parts =
      queue_.Cut({.rows_max = 256, .rows_max_f32 = 256, .bulk_rows_max = 64});

  int64_t bulk_rows = 0;
  int64_t small_rows = 0;
  for (const BatchPart& part : parts) {
    (part.pending->is_small() ? small_rows : bulk_rows) += part.num_rows;
  }
  EXPECT_EQ(bulk_rows, 64);
  EXPECT_EQ(small_rows, 100);
}

TEST_F(RowQueueTest, KeepsTheTurnOfAClientWhoseDtypeDidNotFit) {
  Push({.rows = 10, .dtype = Dtype::kBf16, .client_id = "a"});
  Push({.rows = 2, .dtype = Dtype::kF32, .client_id = "b"});

  const std::vector<BatchPart> first = queue_.Cut(Budget(4));
  const std::vector<BatchPart> second = queue_.Cut(Budget(4));

  ASSERT_EQ(first.size(), 1U);
  EXPECT_EQ(first[0].pending->request.dtype(), Dtype::kBf16);
  ASSERT_EQ(second.size(), 1U);
  EXPECT_EQ(second[0].pending->request.dtype(), Dtype::kF32);
  EXPECT_EQ(second[0].num_rows, 2);
}

TEST_F(RowQueueTest, EndsABatchAtTheLimitOfCandidates) {
  const auto request = Push({.rows = 4, .candidate_counts = {3, 3, 9, 1}});
  BatchBudget budget = Budget(8);
  budget.candidates_max = 7;

  const std::vector<BatchPart> first = queue_.Cut(budget);
  const std::vector<BatchPart> second = queue_.Cut(budget);  // Takes a row above the budget alone.
  const std::vector<BatchPart> third = queue_.Cut(budget);

  ASSERT_EQ(first.size(), 1U);
  EXPECT_EQ(first[0].num_rows, 2);
  ASSERT_EQ(second.size(), 1U);
  EXPECT_EQ(second[0].num_rows, 1);
  ASSERT_EQ(third.size(), 1U);
  EXPECT_EQ(third[0].num_rows, 1);
  EXPECT_TRUE(queue_.empty());
}

TEST_F(RowQueueTest, FillsABatchWithOtherRequestsWhenCandidatesDoNotFit) {
  Push({.rows = 2, .client_id = "a", .candidate_counts = {5, 5}});
  Push({.rows = 3, .client_id = "b"});
  BatchBudget budget = Budget(8);
  budget.candidates_max = 5;

  const std::vector<BatchPart> parts = queue_.Cut(budget);

  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].num_rows, 1);
  EXPECT_EQ(parts[1].num_rows, 3);
  EXPECT_EQ(queue_.rows(), 1);
}

}  // namespace
}  // namespace logprobd::testing
