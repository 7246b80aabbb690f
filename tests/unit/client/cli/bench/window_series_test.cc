#include "client/cli/bench/window_series.h"

#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

/// A second in which `requests` single rows were answered, each after `latency` seconds.
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

TEST(WindowSeriesTest, DoesNotJudgeFewerThanThreeWindows) {
  EXPECT_EQ(SeriesOf({Window(100, 0.01), Window(100, 0.01)}).stable(), std::nullopt);
}

TEST(WindowSeriesTest, IsStableWhenTheLastThreeAgree) {
  EXPECT_EQ(SeriesOf({Window(10, 0.5), Window(100, 0.01), Window(105, 0.01), Window(95, 0.0105)})
                .stable(),
            true);
}

TEST(WindowSeriesTest, IsNotStableWhileThroughputMoves) {
  EXPECT_EQ(SeriesOf({Window(100, 0.01), Window(100, 0.01), Window(140, 0.01)}).stable(), false);
}

TEST(WindowSeriesTest, IsNotStableWhileLatencyMoves) {
  EXPECT_EQ(SeriesOf({Window(100, 0.01), Window(100, 0.01), Window(100, 0.02)}).stable(), false);
}

TEST(WindowSeriesTest, IsNotStableWhenNothingIsAnswered) {
  EXPECT_EQ(SeriesOf({Window(0, 0), Window(0, 0), Window(0, 0)}).stable(), false);
}

TEST(WindowSeriesTest, JoinsTheLastThreeAndAll) {
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
  // Requests that hung until a stable run was over were in no percentile.
  WindowSeries series = SeriesOf({Window(10, 0.01), Window(10, 0.01), Window(10, 0.01)});
  Interval late = Window(2, 30);
  late.sizes[0].errors = 1;

  series.AddLateAnswers(late);

  const Interval last = series.LastWindows();
  EXPECT_EQ(last.Total().latency.max(), 30);
  EXPECT_EQ(last.Total().errors, 1);
  EXPECT_EQ(last.Total().rows, 30);
  EXPECT_EQ(last.seconds, 3);
  EXPECT_EQ(series.all().Total().rows, 30);
  EXPECT_EQ(series.figures().size(), 3U);
}

}  // namespace
}  // namespace logprobd::client
