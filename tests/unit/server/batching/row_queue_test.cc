#include "server/batching/row_queue.h"

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/test_requests.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

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

  /// Returns the rows of a batch by the client of their requests.
  static std::map<std::string, int64_t> RowsByClient(const std::vector<BatchPart>& parts) {
    std::map<std::string, int64_t> rows;
    for (const BatchPart& part : parts) rows[part.pending->request.client_id] += part.num_rows;
    return rows;
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

TEST_F(RowQueueTest, ATurnHasAtMost64Rows) {
  for (const char* client : {"a", "b"}) Push({.rows = 200, .client_id = client});
  BatchBudget budget = Budget(8'192);
  budget.taken_rows_max = 100;

  EXPECT_THAT(RowsByClient(queue_.Cut(budget)), ElementsAre(Pair("a", 64), Pair("b", 36)));
}

TEST_F(RowQueueTest, ARequestOfAtMost256RowsIsSmall) {
  const auto large = Push({.rows = 258, .ignored_rows = {7}});  // 257 rows to score
  EXPECT_FALSE(queue_.has_small());
  EXPECT_EQ(queue_.bulk_rows(), 257);
  queue_.Remove(*large);

  Push({.rows = 257, .ignored_rows = {7}});

  EXPECT_TRUE(queue_.has_small());
  EXPECT_EQ(queue_.bulk_rows(), 0);
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
  EXPECT_EQ(queue_.RowsBefore(*pending), 0);
  EXPECT_THAT(queue_.Queued(), ElementsAre(other));
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

TEST_F(RowQueueTest, ALowerPriorityOwesNothingForRowsThatNobodyElseWanted) {
  Push({.rows = 10'000, .client_id = "low", .priority = Priority::kLow});
  queue_.Cut(Budget(64));

  Push({.rows = 10'000, .client_id = "high", .priority = Priority::kHigh});

  EXPECT_THAT(RowsByClient(queue_.Cut(Budget(64))), ElementsAre(Pair("high", 60), Pair("low", 4)));
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

TEST_F(RowQueueTest, ClientsWhoseRowsDidNotFitComeBeforeThoseThatHadTheirTurn) {
  Push({.rows = 4, .client_id = "first", .candidate_counts = {4, 4, 4, 4}});
  Push({.rows = 4, .client_id = "second", .candidate_counts = {2, 2, 2, 2}});
  Push({.rows = 4, .client_id = "third", .candidate_counts = {2, 2, 2, 2}});
  Push({.rows = 8, .client_id = "last"});
  BatchBudget budget = Budget(64);  // turns of 4 rows
  budget.taken_rows_max = 8;
  budget.candidates_max = 16;

  const auto before = RowsByClient(queue_.Cut(budget));
  const auto after = RowsByClient(queue_.Cut(budget));

  EXPECT_THAT(before, ElementsAre(Pair("first", 4), Pair("last", 4)));
  EXPECT_THAT(after, ElementsAre(Pair("second", 4), Pair("third", 4)));
}

TEST_F(RowQueueTest, SubClientsTakeTurnsWithinTheTurnsOfTheirClient) {
  const auto x = Push({.rows = 1'000, .client_id = "team", .sub_client_id = "x"});
  const auto y = Push({.rows = 1'000, .client_id = "team", .sub_client_id = "y"});
  const auto other = Push({.rows = 1'000, .client_id = "other"});

  std::vector<PendingRequest*> order;
  for (int i = 0; i < 8; ++i) {
    BatchBudget budget = Budget(64);  // turns of 4 rows
    budget.taken_rows_max = 4;
    const std::vector<BatchPart> parts = queue_.Cut(budget);
    ASSERT_EQ(parts.size(), 1U);
    ASSERT_EQ(parts[0].num_rows, 4);
    order.push_back(parts[0].pending.get());
  }

  EXPECT_THAT(order, ElementsAre(x.get(), other.get(), y.get(), other.get(), x.get(), other.get(),
                                 y.get(), other.get()));
}

TEST_F(RowQueueTest, ATurnThatEndsWithinASubClientsTurnContinuesThere) {
  Push({.rows = 6, .client_id = "team", .sub_client_id = "x"});
  const auto y = Push({.rows = 9, .client_id = "team", .sub_client_id = "y"});
  const auto z = Push({.rows = 9, .client_id = "team", .sub_client_id = "z"});
  BatchBudget budget = Budget(64);  // turns of 4 rows
  budget.taken_rows_max = 8;

  queue_.Cut(budget);  // x: 4, y: 4
  budget.taken_rows_max = 7;
  const std::vector<BatchPart> second = queue_.Cut(budget);  // z: 4, x: 2, y: 1
  budget.taken_rows_max = 6;
  const std::vector<BatchPart> third = queue_.Cut(budget);  // y: 3, z: 3

  ASSERT_EQ(second.size(), 3U);
  EXPECT_EQ(second[0].pending, z);
  EXPECT_EQ(second[1].num_rows, 2);
  EXPECT_EQ(second[2].num_rows, 1);
  ASSERT_EQ(third.size(), 2U);
  EXPECT_EQ(third[0].pending, y);
  EXPECT_EQ(third[0].num_rows, 3);
  EXPECT_EQ(third[1].num_rows, 3);
}

TEST_F(RowQueueTest, AThousandSubClientsGetNoMoreThanOne) {
  for (int i = 0; i < 1'000; ++i) {
    Push({.rows = 2, .client_id = "many", .sub_client_id = std::to_string(i)});
  }
  Push({.rows = 2'000, .client_id = "one", .sub_client_id = "x"});

  for (int i = 0; i < 20; ++i) {
    EXPECT_THAT(RowsByClient(queue_.Cut(Budget(64))),
                ElementsAre(std::pair("many", 32), std::pair("one", 32)));
  }
}

TEST_F(RowQueueTest, SubClientsWhoseRowsDoNotFitAreFirstInTheNextBatch) {
  Push({.rows = 2, .dtype = Dtype::kBf16, .client_id = "team", .sub_client_id = "x"});
  const auto y = Push({.rows = 2, .dtype = Dtype::kF32, .client_id = "team", .sub_client_id = "y"});
  const auto z = Push({.rows = 8, .client_id = "team", .sub_client_id = "z"});
  const auto w = Push({.rows = 2, .dtype = Dtype::kF32, .client_id = "team", .sub_client_id = "w"});

  const std::vector<BatchPart> first = queue_.Cut(Budget(8));
  const std::vector<BatchPart> second = queue_.Cut(Budget(8));

  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first[1].pending, z);
  EXPECT_EQ(first[1].num_rows, 6);
  ASSERT_EQ(second.size(), 2U);
  EXPECT_EQ(second[0].pending, y);
  EXPECT_EQ(second[1].pending, w);
  EXPECT_EQ(queue_.rows(), 2);
}

// Regression: the turns of the rest of the client came at the end of each batch, so that each next
// batch began with rows of another client, which those of the blocked sub-client never fit.
TEST_F(RowQueueTest, ASubClientWhoseRowsDoNotFitIsNotPassedByOtherClients) {
  Push({.rows = 10'000, .dtype = Dtype::kBf16, .client_id = "other"});
  Push({.rows = 10'000, .dtype = Dtype::kBf16, .client_id = "team", .sub_client_id = "x"});
  const auto y = Push({.rows = 8, .dtype = Dtype::kF32, .client_id = "team", .sub_client_id = "y"});

  queue_.Cut(Budget(64));  // 16 turns, and so the same number for both clients
  queue_.Cut(Budget(64));

  EXPECT_FALSE(y->is_queued);
}

TEST_F(RowQueueTest, ASubClientWithTooManyCandidatesIsNotPassedByOtherClients) {
  for (const char* client : {"other", "team"}) {
    Push({.rows = 1'000,
          .client_id = client,
          .sub_client_id = "x",
          .candidate_counts = std::vector<int64_t>(1'000, 1)});
  }
  const auto y = Push({.client_id = "team", .sub_client_id = "y", .candidate_counts = {1'000}});
  BatchBudget budget = Budget(64);
  budget.candidates_max = 1'000;

  queue_.Cut(budget);
  queue_.Cut(budget);

  EXPECT_FALSE(y->is_queued);
}

TEST_F(RowQueueTest, EveryClientThatWaitsForAnotherDtypeGetsABatch) {
  Push({.rows = 10'000, .dtype = Dtype::kF32, .client_id = "f32"});
  Push({.rows = 10'000, .dtype = Dtype::kBf16, .client_id = "bf16"});
  Push({.rows = 10'000, .dtype = Dtype::kBf16, .client_id = "team", .sub_client_id = "x"});
  const auto y = Push({.rows = 4, .dtype = Dtype::kF16, .client_id = "team", .sub_client_id = "y"});
  std::map<std::string, int64_t> rows;

  for (int i = 0; i < 4; ++i) {
    for (const auto& [client, taken] : RowsByClient(queue_.Cut(Budget(64)))) rows[client] += taken;
  }

  EXPECT_FALSE(y->is_queued);
  EXPECT_GE(rows["f32"], 64);
  EXPECT_GE(rows["bf16"], 32);
}

// A client has many small requests and a large one of another dtype, and nobody else waits.
TEST_F(RowQueueTest, ALargeRequestDoesNotStarveBehindSmallOnesOfAnotherDtype) {
  const auto large = Push({.rows = 300, .dtype = Dtype::kF32, .client_id = "a"});
  int64_t small_rows = 0;
  for (int i = 0; i < 20; ++i) {
    while (queue_.rows() < 1'000) Push({.rows = 100, .client_id = "a"});
    for (const BatchPart& part : queue_.Cut(Budget(64))) {
      small_rows += part.pending == large ? 0 : part.num_rows;
    }
  }

  EXPECT_FALSE(large->is_queued);  // It needs 5 batches.
  EXPECT_GE(small_rows, 14 * 64);
}

// Large requests use up their part of each batch before the turn of the client with a small one.
TEST_F(RowQueueTest, ASmallRequestOfAnotherDtypeDoesNotStarveBehindLargeOnes) {
  Push({.rows = 100'000, .client_id = "a"});
  Push({.rows = 100'000, .client_id = "b"});
  const auto small = Push({.rows = 5, .dtype = Dtype::kF32, .client_id = "b"});

  queue_.Cut({.rows_max = 1'024, .rows_max_f32 = 1'024, .bulk_rows_max = 256});
  queue_.Cut({.rows_max = 1'024, .rows_max_f32 = 1'024, .bulk_rows_max = 256});

  EXPECT_FALSE(small->is_queued);
}

// The large requests of all clients do not fit into their part of a batch, and its turns end where
// they began.
TEST_F(RowQueueTest, ALargeRequestDoesNotStarveWhereSmallOnesUseTheTurnsOfItsClient) {
  std::vector<std::shared_ptr<PendingRequest>> large;
  for (int i = 0; i < 16; ++i) {
    large.push_back(Push({.rows = 100'000, .client_id = std::to_string(i)}));
    for (int j = 0; j < 100; ++j) Push({.rows = 200, .client_id = std::to_string(i)});
  }

  for (int i = 0; i < 32; ++i) {
    queue_.Cut({.rows_max = 1'024, .rows_max_f32 = 1'024, .bulk_rows_max = 256});
  }

  for (const auto& request : large) EXPECT_GT(request->next_row, 0);
}

// Each flow has small requests, large ones or both, and never runs dry. In half of the trials each
// request has a dtype and a number of candidates of its own, in the others each flow has, and
// requests of one size. Requests are cancelled now and then.
TEST_F(RowQueueTest, NoRequestStarvesHoweverDtypesSizesAndCandidatesAreMixed) {
  constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kF16, Dtype::kF32};
  constexpr int64_t kCandidates[] = {0, 1, 400};
  std::mt19937 random(7);
  const auto draw = [&](int64_t min, int64_t max) {
    return std::uniform_int_distribution<int64_t>(min, max)(random);
  };
  /// Requests of one size of one flow, one after another.
  struct Source {
    std::string client_id;
    std::string sub_client_id;
    bool is_small = true;
    std::shared_ptr<PendingRequest> request = nullptr;
    int64_t candidates = 0;  ///< Number for each row.
    Dtype dtype = Dtype::kBf16;
    int last_served = 0;
  };
  for (int trial = 0; trial < 40; ++trial) {
    SCOPED_TRACE(trial);
    const bool changes = trial % 2 == 0;  // whether requests of a source differ
    std::vector<Source> sources;
    const int64_t num_clients = draw(1, 6);
    for (int64_t client = 0; client < num_clients; ++client) {
      const int64_t num_sub_clients = draw(0, 3);
      for (int64_t sub = num_sub_clients == 0 ? 0 : 1; sub <= num_sub_clients; ++sub) {
        const int64_t sizes = changes ? draw(0, 2) : draw(0, 1);
        for (const bool is_small : {true, false}) {
          if (sizes != (is_small ? 0 : 1)) {
            sources.push_back({.client_id = std::to_string(client),
                               .sub_client_id = sub == 0 ? "" : std::to_string(sub),
                               .is_small = is_small});
          }
        }
      }
    }
    const auto push = [&](Source& source) {
      if (changes || source.request == nullptr) {
        source.dtype = kDtypes[draw(0, 2)];
        source.candidates = kCandidates[draw(0, 2)];
      }
      RequestSpec spec = {.rows = source.is_small ? draw(1, 40) : draw(257, 300),
                          .dtype = source.dtype};
      spec.client_id = source.client_id;
      spec.sub_client_id = source.sub_client_id;
      spec.candidate_counts.assign(static_cast<size_t>(spec.rows), source.candidates);
      source.request = Push(spec);
    };
    BatchBudget budget = Budget(draw(8, 128));
    budget.bulk_rows_max = budget.rows_max / draw(1, 4);
    budget.candidates_max = 1'000;
    const auto num_sources = static_cast<int>(sources.size());
    for (int cut = 1; cut <= 300; ++cut) {
      for (Source& source : sources) {
        if (source.request != nullptr && source.request->is_queued && draw(0, 99) == 0) {
          queue_.Remove(*source.request);
        }
        if (source.request == nullptr || !source.request->is_queued) push(source);
      }
      int64_t rows = 0;
      int64_t bulk_rows = 0;
      int64_t candidates = 0;
      for (const BatchPart& part : queue_.Cut(budget)) {
        const auto source = std::find_if(sources.begin(), sources.end(), [&](const Source& each) {
          return each.request == part.pending;
        });
        ASSERT_NE(source, sources.end());
        source->last_served = cut;
        rows += part.num_rows;
        bulk_rows += source->is_small ? 0 : part.num_rows;
        candidates += part.num_rows * source->candidates;
      }
      ASSERT_GT(rows, 0);
      ASSERT_LE(rows, budget.rows_max);
      ASSERT_LE(bulk_rows, budget.bulk_rows_max);
      ASSERT_LE(candidates, budget.candidates_max);
      for (const Source& source : sources) {
        ASSERT_LE(cut - source.last_served, (changes ? 6 : 3) * num_sources);
      }
    }
    for (const Source& source : sources) {
      if (source.request->is_queued) queue_.Remove(*source.request);
    }
    ASSERT_TRUE(queue_.empty());
  }
}

TEST_F(RowQueueTest, AClientWhoseSubClientsAreBlockedInEachBatchGetsNoLargerShare) {
  constexpr int kOthers = 40;
  for (int i = 0; i < kOthers; ++i) {
    Push({.rows = 1'000, .client_id = std::to_string(i)});
  }
  Push({.rows = 1'000, .client_id = "team", .sub_client_id = "x"});
  Push({.rows = 1'000,
        .client_id = "team",
        .sub_client_id = "y",
        .candidate_counts = std::vector<int64_t>(1'000, 600)});
  BatchBudget budget = Budget(64);  // 16 turns of 4 rows
  budget.candidates_max = 1'000;    // one row of y

  std::map<std::string, int64_t> rows;
  for (int i = 0; i < 100; ++i) {
    for (const auto& [client, taken] : RowsByClient(queue_.Cut(budget))) rows[client] += taken;
  }

  EXPECT_NEAR(static_cast<double>(rows["team"]), 6'400.0 / (kOthers + 1), 8);
  EXPECT_NEAR(static_cast<double>(rows["7"]), 6'400.0 / (kOthers + 1), 8);
}

// The sub-client that does not fit has no more than a few rows each time it starts a batch, so that
// the rest of the turn is left over.
TEST_F(RowQueueTest, AClientWhoseStartsUseAPartOfItsTurnGetsNoLargerShare) {
  constexpr int kOthers = 40;
  for (int i = 0; i < kOthers; ++i) {
    Push({.rows = 20'000, .client_id = std::to_string(i)});
  }
  Push({.rows = 20'000, .client_id = "team", .sub_client_id = "x"});
  const auto push_y = [&] {
    return Push({.rows = 1, .dtype = Dtype::kF32, .client_id = "team", .sub_client_id = "y"});
  };
  auto y = push_y();

  std::map<std::string, int64_t> rows;
  int64_t total = 0;
  for (int i = 0; i < 1'000; ++i) {
    if (!y->is_queued) y = push_y();
    for (const auto& [client, taken] : RowsByClient(queue_.Cut(Budget(64)))) {
      rows[client] += taken;
      total += taken;
    }
  }

  const double share = static_cast<double>(total) / (kOthers + 1);
  EXPECT_NEAR(static_cast<double>(rows["team"]), share, share / 100);
  EXPECT_NEAR(static_cast<double>(rows["7"]), share, share / 100);
}

TEST_F(RowQueueTest, ASmallRequestPassesTheLargeOnesOfOtherSubClients) {
  for (int i = 0; i < 100; ++i) {
    Push({.rows = 1'000, .client_id = "team", .sub_client_id = std::to_string(i)});
  }
  const auto small = Push({.rows = 5, .client_id = "team", .sub_client_id = "small"});

  queue_.Cut({.rows_max = 256, .rows_max_f32 = 256, .bulk_rows_max = 64});

  EXPECT_FALSE(small->is_queued);
  EXPECT_FALSE(queue_.has_small());
}

TEST_F(RowQueueTest, RemovesTheRequestsOfSubClients) {
  const auto first = Push({.rows = 3, .client_id = "team", .sub_client_id = "x"});
  const auto second = Push({.rows = 4, .client_id = "team", .sub_client_id = "x"});
  const auto other = Push({.rows = 5, .client_id = "team", .sub_client_id = "y"});
  EXPECT_EQ(queue_.RowsBefore(*first), 7);
  EXPECT_EQ(queue_.RowsBefore(*other), 5);

  queue_.Remove(*first);
  queue_.Remove(*second);
  EXPECT_EQ(queue_.RowsBefore(*first), 0);
  EXPECT_EQ(queue_.RowsBefore(*other), 5);
  queue_.Remove(*other);

  EXPECT_TRUE(queue_.empty());
  EXPECT_TRUE(queue_.Cut(Budget(8)).empty());
}

}  // namespace
}  // namespace logprobd::testing
