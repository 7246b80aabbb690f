#include "client/cli/bench/load_recorder.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

TEST(LoadRecorderTest, JoinsWhatManyThreadsFound) {
  LoadRecorder recorder(/*num_sizes=*/2);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 12; ++thread) {
    threads.emplace_back([&recorder] {
      for (int i = 0; i < 100; ++i) {
        recorder.RecordAnswer(/*size=*/1, /*rows=*/4, 0.001, Transport::kTcp);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  const Interval found = recorder.Take();

  EXPECT_EQ(found.sizes[0].requests(), 0);
  EXPECT_EQ(found.sizes[1].requests(), 1'200);
  EXPECT_EQ(found.sizes[1].rows, 4'800);
  EXPECT_EQ(found.sizes[1].TransportText(), "tcp");
}

TEST(LoadRecorderTest, TellsHowRowsTravelledTheMostUsedWayFirst) {
  LoadRecorder recorder(2);
  recorder.RecordAnswer(0, 1, 0.001, Transport::kTcp);
  recorder.RecordAnswer(1, 1, 0.001, Transport::kSharedMemory);
  recorder.RecordAnswer(1, 1, 0.001, Transport::kSharedMemory);

  const Interval found = recorder.Take();

  EXPECT_EQ(found.Total().TransportText(), "shm+tcp");
  EXPECT_EQ(SizeStats().TransportText(), "");
}

TEST(LoadRecorderTest, TakesEverythingOnce) {
  LoadRecorder recorder(1);
  recorder.RecordAnswer(0, 1, 0.001, Transport::kSharedMemory);
  recorder.Take();

  recorder.RecordFailure(0, absl::UnavailableError("gone"));
  recorder.RecordLate(0.5, /*by_server=*/false);
  recorder.RecordLate(0.25, /*by_server=*/true);
  recorder.RecordUnsent(3);
  const Interval found = recorder.Take();

  EXPECT_EQ(found.Total().requests(), 0);
  EXPECT_EQ(found.Total().errors, 1);
  EXPECT_EQ(found.first_error, absl::UnavailableError("gone"));
  EXPECT_EQ(found.late.by_generator, 1);
  EXPECT_EQ(found.late.by_server, 1);
  EXPECT_EQ(found.late.unsent, 3);
  EXPECT_EQ(found.late.generator_seconds_max, 0.5);
  EXPECT_EQ(found.late.server_seconds_max, 0.25);
}

}  // namespace
}  // namespace logprobd::client
