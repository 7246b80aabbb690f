#include <algorithm>
#include <cstdint>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/server/batching/batcher_fixture.h"

namespace logprobd::testing {
namespace {

class BatcherFairnessTest : public BatcherTest {
 protected:
  /// Submits a request whose rows all have `target`, so that they can be counted in a batch.
  Answer& SubmitMarked(const RequestSpec& spec, int32_t target) {
    ScoreRequest request = MakeRequest(spec);
    std::fill(request.targets.begin(), request.targets.end(), target);
    return SubmitRequest(std::move(request));
  }

  int64_t RowsIn(int batch, int32_t target) const {
    const std::vector<int32_t> targets = engine_->batches()[static_cast<size_t>(batch)].targets;
    return std::count(targets.begin(), targets.end(), target);
  }

  void RunToTheEnd() {
    engine_->Release();
    EXPECT_TRUE(batcher_->Drain(absl::InfiniteFuture()));
  }
};

TEST_F(BatcherFairnessTest, SharesEachBatchBetweenClientsByRows) {
  MakeBatcher({.batch_rows_max = 16, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  for (int i = 0; i < 10; ++i) {
    SubmitMarked({.rows = 20, .client_id = "many"}, 1);
  }
  SubmitMarked({.rows = 20, .client_id = "few"}, 2);
  SubmitMarked({.rows = 4, .client_id = "fewest"}, 3);

  RunToTheEnd();

  EXPECT_NEAR(static_cast<double>(RowsIn(2, 1)), 6, 1);
  EXPECT_NEAR(static_cast<double>(RowsIn(2, 2)), 6, 1);
  EXPECT_EQ(RowsIn(2, 3), 4);
  EXPECT_EQ(RowsIn(3, 1), 8);
  EXPECT_EQ(RowsIn(3, 2), 8);
}

TEST_F(BatcherFairnessTest, ServesMoreClientsThanABatchHasRowsInTurns) {
  MakeBatcher({.batch_rows_max = 4, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  for (int32_t client = 0; client < 8; ++client) {
    SubmitMarked({.rows = 2, .client_id = std::to_string(client)}, client);
  }

  RunToTheEnd();

  for (int32_t client = 0; client < 8; ++client) {
    EXPECT_EQ(RowsIn(2 + client / 4, client), 1);
    EXPECT_EQ(RowsIn(4 + client / 4, client), 1);
  }
}

TEST_F(BatcherFairnessTest, ServesHigherPrioritiesFirst) {
  MakeBatcher({.batch_rows_max = 32, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  SubmitMarked({.rows = 64, .client_id = "a", .priority = Priority::kLow}, 3);
  SubmitMarked({.rows = 64, .client_id = "b", .priority = Priority::kNormal}, 2);
  SubmitMarked({.rows = 64, .client_id = "c", .priority = Priority::kHigh}, 1);

  RunToTheEnd();

  EXPECT_EQ(RowsIn(2, 1), 28);
  EXPECT_EQ(RowsIn(2, 2), 2);
  EXPECT_EQ(RowsIn(2, 3), 2);
}

TEST_F(BatcherFairnessTest, KeepsAShareForLowerPrioritiesUnderAnEndlessFlood) {
  MakeBatcher({.batch_rows_max = 4, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  SubmitMarked({.rows = 200, .client_id = "flood", .priority = Priority::kHigh}, 1);
  SubmitMarked({.rows = 4, .client_id = "low", .priority = Priority::kLow}, 3);

  RunToTheEnd();

  int64_t low_rows = 0;
  for (int batch = 2; batch < 2 + 16; ++batch) {
    low_rows += RowsIn(batch, 3);
  }
  EXPECT_EQ(low_rows, 4);
  EXPECT_EQ(RowsIn(2, 3), 0);
}

TEST_F(BatcherFairnessTest, LetsALowerPriorityOfAnotherDtypeThrough) {
  MakeBatcher({.batch_rows_max = 4, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  SubmitMarked({.rows = 200, .client_id = "flood", .priority = Priority::kHigh}, 1);
  SubmitMarked({.rows = 2, .dtype = Dtype::kF32, .client_id = "low", .priority = Priority::kLow},
               3);

  RunToTheEnd();

  int64_t low_rows = 0;
  for (int batch = 2; batch < 2 + 17; ++batch) {
    low_rows += RowsIn(batch, 3);
  }
  EXPECT_EQ(low_rows, 2);
}

TEST_F(BatcherFairnessTest, LetsAClientsSmallRequestsPassItsLargeOnes) {
  MakeBatcher({.batch_rows_max = 64, .batch_wait_max = absl::ZeroDuration()});
  OccupyBothSlots();
  SubmitMarked({.rows = 2'000}, 1);
  SubmitMarked({.rows = 10}, 2);

  RunToTheEnd();

  EXPECT_EQ(RowsIn(2, 2), 10);
}

}  // namespace
}  // namespace logprobd::testing
