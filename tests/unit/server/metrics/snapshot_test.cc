#include "server/metrics/snapshot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "server/metrics/metrics.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;

constexpr double kInf = HUGE_VAL;

TEST(HistogramCountsTest, InterpolatesAQuantileInItsBucket) {
  const HistogramCounts counts{{1, 2, 4, kInf}, {0, 10, 20, 20}, 50};

  EXPECT_EQ(counts.count(), 20);
  EXPECT_DOUBLE_EQ(counts.mean(), 2.5);
  EXPECT_DOUBLE_EQ(counts.Quantile(0.25), 1.5);
  EXPECT_DOUBLE_EQ(counts.Quantile(0.5), 2);
  EXPECT_DOUBLE_EQ(counts.Quantile(0.75), 3);
  EXPECT_DOUBLE_EQ(counts.Quantile(1), 4);
}

TEST(HistogramCountsTest, AQuantileAtTheEndOfABucketIsItsBound) {
  const HistogramCounts counts{{1, 2, 4, kInf}, {10, 10, 20, 20}, 50};  // none in (1, 2]

  EXPECT_DOUBLE_EQ(counts.Quantile(0.5), 1);
  EXPECT_DOUBLE_EQ(counts.Quantile(0.55), 2.2);
}

TEST(HistogramCountsTest, TheSmallestQuantileIsZeroIfTheFirstBucketIsEmpty) {
  EXPECT_EQ(HistogramCounts({{1, 2, kInf}, {0, 5, 5}, 8}).Quantile(0), 0);
}

TEST(HistogramCountsTest, TheFirstBucketBeginsAtZero) {
  const HistogramCounts counts{{8, kInf}, {4, 4}, 16};

  EXPECT_DOUBLE_EQ(counts.Quantile(0.5), 4);
}

TEST(HistogramCountsTest, GivesTheLastBoundForValuesBeyondIt) {
  const HistogramCounts counts{{1, 2, kInf}, {0, 0, 3}, 300};

  EXPECT_DOUBLE_EQ(counts.Quantile(0.5), 2);
  EXPECT_DOUBLE_EQ(HistogramCounts({{8, kInf}, {0, 3}, 300}).Quantile(0.5), 8);
  EXPECT_DOUBLE_EQ(HistogramCounts({{kInf}, {3}, 300}).Quantile(0.5), 0);  // there is no bound
}

TEST(HistogramCountsTest, GivesZerosWithoutObservations) {
  const HistogramCounts none{{1, kInf}, {0, 0}, 0};

  EXPECT_EQ(none.Quantile(0.99), 0);
  EXPECT_EQ(none.mean(), 0);
  EXPECT_EQ(HistogramCounts().Quantile(0.5), 0);
}

TEST(HistogramCountsTest, AddsAndSubtractsBucketByBucket) {
  const HistogramCounts earlier{{1, 2, kInf}, {1, 2, 3}, 5};
  HistogramCounts later = earlier;
  later.Add({{1, 2, kInf}, {0, 4, 4}, 6});

  const HistogramCounts between = later.Since(earlier);

  EXPECT_THAT(later.cumulative, ElementsAre(1, 6, 7));
  EXPECT_THAT(between.cumulative, ElementsAre(0, 4, 4));
  EXPECT_DOUBLE_EQ(between.sum, 6);
  EXPECT_THAT(later.Since({}).cumulative, ElementsAre(1, 6, 7));
  const HistogramCounts nothing = earlier.Since(later);
  EXPECT_THAT(nothing.cumulative, ElementsAre(0, 0, 0));
  EXPECT_EQ(nothing.sum, 0);
}

TEST(HistogramCountsTest, AddsToAnEmptyHistogram) {
  HistogramCounts sum;
  sum.Add({{1, kInf}, {2, 3}, 5});
  sum.Add({{1, kInf}, {1, 4}, 6});

  EXPECT_THAT(sum.upper_bounds, ElementsAre(1, kInf));
  EXPECT_THAT(sum.cumulative, ElementsAre(3, 7));
  EXPECT_DOUBLE_EQ(sum.sum, 11);
}

TEST(MetricsSnapshotTest, SumsTheSeriesThatHaveTheLabels) {
  Metrics metrics({.heads = {"a", "b"}});
  metrics.RecordRows("a", 10, 2, 1);
  metrics.RecordRows("b", 5, 0, 0);
  metrics.SetQueueOldestAge("b", 1.5);

  const MetricsSnapshot snapshot = metrics.Snapshot();

  EXPECT_EQ(snapshot.Sum("logprobd_rows_total"), 18);
  EXPECT_EQ(snapshot.Sum("logprobd_rows_total", {{"kind", "scored"}}), 15);
  EXPECT_EQ(snapshot.Sum("logprobd_rows_total", {{"kind", "scored"}, {"head", "a"}}), 10);
  EXPECT_EQ(snapshot.Sum("logprobd_queue_oldest_age_seconds", {{"head", "b"}}), 1.5);
  EXPECT_EQ(snapshot.Sum("logprobd_rows_total", {{"head", "c"}}), 0);
  EXPECT_EQ(snapshot.Sum("no_such_family"), 0);
}

TEST(MetricsSnapshotTest, AddsHistogramsOverMethodsAndTransports) {
  Metrics metrics({.heads = {"a", "b"}});
  metrics.RecordRequest(Metrics::Method::kScore, "a", absl::StatusCode::kOk, 0.010,
                        Metrics::Transport::kTcp);
  metrics.RecordRequest(Metrics::Method::kScoreStream, "a", absl::StatusCode::kOk, 0.030,
                        Metrics::Transport::kShm);
  metrics.RecordRequest(Metrics::Method::kScore, "b", absl::StatusCode::kOk, 9,
                        Metrics::Transport::kTcp);

  const HistogramCounts latency =
      metrics.Snapshot().Histogram("logprobd_request_duration_seconds", {{"head", "a"}});

  EXPECT_EQ(latency.count(), 2);
  EXPECT_DOUBLE_EQ(latency.mean(), 0.020);
  EXPECT_GT(latency.Quantile(0.99), 0.025);
  EXPECT_LT(latency.Quantile(0.99), 0.050);
}

TEST(MetricsSnapshotTest, NamesTheValuesOfALabelOnce) {
  const Metrics metrics({.heads = {"a"}, .gpus = {0, 3}});

  EXPECT_THAT(metrics.Snapshot().LabelValues("logprobd_gpu_memory_bytes", "gpu"),
              ::testing::UnorderedElementsAre("0", "3"));
  EXPECT_THAT(metrics.Snapshot().LabelValues("no_such_family", "gpu"), ::testing::IsEmpty());
}

}  // namespace
}  // namespace logprobd
