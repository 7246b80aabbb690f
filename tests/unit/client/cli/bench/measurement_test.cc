#include "client/cli/bench/measurement.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#include "client/cli/bench/schedule.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

// Width of a bucket, relative to its values.
constexpr double kResolution = 1.0 / 128;

TEST(LatencyHistogramTest, EverythingIsZeroWithoutAValue) {
  const LatencyHistogram histogram;

  EXPECT_EQ(histogram.count(), 0);
  EXPECT_EQ(histogram.mean(), 0);
  EXPECT_EQ(histogram.max(), 0);
  EXPECT_EQ(histogram.Percentile(50), 0);
}

TEST(LatencyHistogramTest, EveryPercentileOfASingleValueIsThatValue) {
  LatencyHistogram histogram;

  histogram.Record(0.25);

  EXPECT_EQ(histogram.mean(), 0.25);
  EXPECT_EQ(histogram.Percentile(0), 0.25);
  EXPECT_EQ(histogram.Percentile(99.9), 0.25);
}

TEST(LatencyHistogramTest, PercentilesAreOfTheNearestRankWithinTheResolution) {
  Random random(7);
  LatencyHistogram histogram;
  std::vector<double> values;
  for (int i = 0; i < 20'000; ++i) {
    values.push_back(1e-4 * std::exp(3 * static_cast<double>(random.Normal())));
    histogram.Record(values.back());
  }
  std::sort(values.begin(), values.end());

  for (const double percent : {1.0, 10.0, 50.0, 90.0, 99.0, 99.9}) {
    const auto rank = static_cast<size_t>(std::ceil(percent / 100 * 20'000)) - 1;
    EXPECT_GE(histogram.Percentile(percent), values[rank] - 1e-9) << percent;
    EXPECT_LE(histogram.Percentile(percent), values[rank] * (1 + kResolution) + 1e-9) << percent;
  }
  EXPECT_EQ(histogram.Percentile(100), values.back());
}

TEST(LatencyHistogramTest, KeepsTheOrderOfValuesOfAnySize) {
  for (int64_t nanoseconds = 1; nanoseconds < 100'000; nanoseconds += 1 + nanoseconds / 50) {
    LatencyHistogram histogram;
    const double low = static_cast<double>(nanoseconds) * 1e-9;
    const double high = low * 1.5 + 2e-9;
    for (int i = 0; i < 3; ++i) histogram.Record(low);
    histogram.Record(high);

    EXPECT_LE(histogram.Percentile(50), low * (1 + kResolution) + 1.1e-9) << nanoseconds;
    EXPECT_GE(histogram.Percentile(100), high - 1e-12) << nanoseconds;
  }
}

TEST(LatencyHistogramTest, HasBucketsForAnHour) {
  LatencyHistogram histogram;

  for (const double seconds : {1.0, 4'300.0, 4'390.0}) histogram.Record(seconds);

  EXPECT_GE(histogram.Percentile(60), 4'300);
  EXPECT_LE(histogram.Percentile(60), 4'300 * (1 + kResolution));
}

TEST(LatencyHistogramTest, IsExactBelowAQuarterOfAMicrosecond) {
  LatencyHistogram histogram;
  for (int i = 1; i <= 200; ++i) histogram.Record(i * 1e-9);

  // The percentile is the upper end of the bucket of 100 ns.
  EXPECT_DOUBLE_EQ(histogram.Percentile(50), 101e-9);
}

TEST(LatencyHistogramTest, CountsValuesBeyondItsRange) {
  LatencyHistogram histogram;

  histogram.Record(-1);
  histogram.Record(1e6);

  EXPECT_EQ(histogram.count(), 2);
  EXPECT_EQ(histogram.max(), 1e6);
}

TEST(LatencyHistogramTest, MergesAsIfAllValuesWereRecordedInOne) {
  LatencyHistogram one;
  LatencyHistogram other;
  LatencyHistogram all;
  for (int i = 1; i < 1'000; ++i) {
    (i % 3 == 0 ? one : other).Record(i * 1e-5);
    all.Record(i * 1e-5);
  }

  one.Merge(other);
  one.Merge({});

  EXPECT_EQ(one.count(), all.count());
  EXPECT_EQ(one.max(), all.max());
  EXPECT_NEAR(one.mean(), all.mean(), 1e-12);
  for (const double percent : {1.0, 50.0, 99.0}) {
    EXPECT_EQ(one.Percentile(percent), all.Percentile(percent));
  }
}

TEST(LatencyHistogramTest, ShowsEveryValueInABucketAroundIt) {
  LatencyHistogram histogram;
  const std::vector<double> values = {3e-9, 255e-9, 256e-9, 1e-6, 0.0123, 7.5};
  for (const double value : values) histogram.Record(value);

  size_t at = 0;
  histogram.ForEachBucket([&](double begin, double end, int64_t count) {
    ASSERT_LT(at, values.size());
    EXPECT_LE(begin, values[at] * (1 + 1e-12));
    EXPECT_GT(end, values[at]);
    EXPECT_LE(end - begin, std::max(1.001e-9, values[at] * kResolution));
    EXPECT_EQ(count, 1);
    ++at;
  });

  EXPECT_EQ(at, values.size());
}

TEST(LoadRecorderTest, JoinsTheRecordsOfManyThreads) {
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

TEST(LoadRecorderTest, NamesTheMostUsedTransportFirst) {
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

/// Returns an interval of one second with `requests` answered rows, each after `latency` seconds.
Interval Window(int requests, double latency) {
  Interval window;
  window.seconds = 1;
  window.sizes.resize(1);
  window.sizes[0].rows = requests;
  for (int i = 0; i < requests; ++i) window.sizes[0].latency.Record(latency);
  return window;
}

WindowSeries SeriesOf(std::initializer_list<Interval> windows) {
  WindowSeries series({.share = 0.1});
  for (const Interval& window : windows) series.Add(window);
  return series;
}

TEST(WindowSeriesTest, HasNoVerdictForFewerThanThreeWindows) {
  EXPECT_EQ(SeriesOf({Window(100, 0.01), Window(100, 0.01)}).stable(), std::nullopt);
}

TEST(WindowSeriesTest, IsStableWhenTheLastThreeAgree) {
  EXPECT_EQ(SeriesOf({Window(10, 0.5), Window(100, 0.01), Window(105, 0.01), Window(95, 0.0105)})
                .stable(),
            true);
}

TEST(WindowSeriesTest, IsNotStableWhileThroughputChanges) {
  EXPECT_EQ(SeriesOf({Window(100, 0.01), Window(100, 0.01), Window(140, 0.01)}).stable(), false);
}

TEST(WindowSeriesTest, IsNotStableWhileLatencyChanges) {
  EXPECT_EQ(SeriesOf({Window(100, 0.01), Window(100, 0.01), Window(100, 0.02)}).stable(), false);
}

TEST(WindowSeriesTest, IsNotStableWhenNothingIsAnswered) {
  EXPECT_EQ(SeriesOf({Window(0, 0), Window(0, 0), Window(0, 0)}).stable(), false);
}

TEST(WindowSeriesTest, JoinsTheLastThreeWindowsAndTheWholeRun) {
  Interval late = Window(3, 0.03);
  late.begin_seconds = 1;
  late.late = {.by_generator = 2,
               .generator_seconds_max = 0.5,
               .by_server = 1,
               .server_seconds_max = 0.25,
               .unsent = 0};
  late.first_error = absl::UnavailableError("gone");
  late.sizes[0].errors = 4;
  WindowSeries series = SeriesOf({Window(1, 0.01), late, Window(5, 0.05), Window(7, 0.07)});

  series.Extend(Window(9, 0.09));

  const Interval last = series.LastWindows();
  EXPECT_EQ(last.seconds, 3);
  EXPECT_EQ(last.begin_seconds, 1);
  EXPECT_EQ(last.Total().requests(), 15);
  EXPECT_EQ(last.late.by_generator, 2);
  EXPECT_EQ(last.late.generator_seconds_max, 0.5);
  EXPECT_EQ(last.first_error, absl::UnavailableError("gone"));
  EXPECT_EQ(series.all().Total().requests(), 25);
  EXPECT_EQ(series.all().Total().errors, 4);
  EXPECT_EQ(series.all().seconds, 5);
  EXPECT_EQ(series.figures().size(), 4U);
  EXPECT_EQ(series.figures()[2].rows_per_second, 5);
}

TEST(WindowSeriesTest, CountsLatenciesAndErrorsOfLateAnswersButNotTheirRows) {
  // Otherwise no percentile would show requests that hang until the end of a stable run.
  WindowSeries series = SeriesOf({Window(10, 0.01), Window(10, 0.01), Window(10, 0.01)});
  Interval late = Window(2, 30);
  late.sizes[0].errors = 1;

  series.AddLateAnswers(late);

  const Interval last = series.LastWindows();
  EXPECT_EQ(last.Total().latency.max(), 30);
  EXPECT_EQ(last.Total().errors, 1);
  EXPECT_EQ(last.Total().rows, 30);
  EXPECT_EQ(last.seconds, 3);
  EXPECT_EQ(series.all().Total().latency.max(), 30);
  EXPECT_EQ(series.all().Total().errors, 1);
  EXPECT_EQ(series.all().Total().rows, 30);
  EXPECT_EQ(series.figures().size(), 3U);
}

}  // namespace
}  // namespace logprobd::client
