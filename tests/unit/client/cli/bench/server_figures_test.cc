#include "client/cli/bench/server_figures.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

MetricsPage Parse(const std::string& text) { return *MetricsPage::Parse(text); }

/// A server's page after `steps` equal steps.
MetricsPage PageAfter(int steps) {
  return Parse(
      absl::StrCat("process_start_time_seconds 1000\n",                                      //
                   "logprobd_rows_total{head=\"h\",kind=\"scored\"} ", 100 * steps,          //
                   "\nlogprobd_rows_total{head=\"other\",kind=\"scored\"} ", 7 * steps,      //
                   "\nlogprobd_batch_rows_count{head=\"h\"} ", 4 * steps,                    //
                   "\nlogprobd_batch_rows_sum{head=\"h\"} ", 100 * steps,                    //
                   "\nlogprobd_stage_duration_seconds_count{stage=\"queue\"} ", 10 * steps,  //
                   "\nlogprobd_stage_duration_seconds_sum{stage=\"queue\"} ", 0.5 * steps,   //
                   "\nlogprobd_stage_duration_seconds_count{stage=\"kernel\"} ", 4 * steps,  //
                   "\nlogprobd_stage_duration_seconds_sum{stage=\"kernel\"} ", 0.2 * steps,  //
                   "\nlogprobd_stage_duration_seconds_count{stage=\"h2d\"} 0",               //
                   "\nlogprobd_stage_duration_seconds_sum{stage=\"h2d\"} 0",                 //
                   "\nlogprobd_rejected_total{reason=\"queue_rows\"} ", 3 * steps,           //
                   "\nlogprobd_rejected_total{reason=\"invalid\"} 9",                        //
                   "\nlogprobd_received_bytes_total{transport=\"tcp\"} ", 5e8 * steps,       //
                   "\nprocess_cpu_seconds_total ", 2 * steps,                                //
                   "\nlogprobd_gpu_busy_seconds_total{gpu=\"0\"} ", 0.75 * steps,            //
                   "\nlogprobd_flops_total{gpu=\"0\"} ", 4e14 * steps, "\n"));
}

TEST(ServerFiguresTest, AreTheDifferencesOfTwoPages) {
  ServerPeaks peaks;
  peaks.queue_rows = 42;
  peaks.resident_bytes = 1e9;

  const auto figures = CompareMetrics(PageAfter(3), PageAfter(5), "h", peaks, /*seconds=*/2);

  ASSERT_TRUE(figures.ok()) << figures.status();
  EXPECT_EQ(figures->rows_scored, 200);
  EXPECT_EQ(figures->batches, 8);
  EXPECT_EQ(figures->batch_rows_mean, 25);
  ASSERT_EQ(figures->stages.size(), 2U);
  EXPECT_EQ(figures->stages[0].name, "queue");
  EXPECT_EQ(figures->stages[0].count, 20);
  EXPECT_DOUBLE_EQ(figures->stages[0].mean_seconds, 0.05);
  EXPECT_EQ(figures->stages[1].name, "kernel");
  EXPECT_DOUBLE_EQ(figures->stages[1].mean_seconds, 0.05);
  EXPECT_EQ(figures->queue_rows_peak, 42);
  EXPECT_THAT(figures->rejected, ElementsAre(Pair("queue_rows", 6)));
  EXPECT_EQ(figures->cpu_seconds, 4);
  EXPECT_EQ(figures->cpu_seconds_per_gigabyte, 4);
  EXPECT_EQ(figures->resident_bytes_peak, 1e9);
  ASSERT_EQ(figures->gpus.size(), 1U);
  EXPECT_EQ(figures->gpus[0].busy_ratio, 0.75);
  EXPECT_EQ(figures->gpus[0].teraflops, 400);
}

TEST(ServerFiguresTest, OfNoWorkAreZero) {
  const auto figures = CompareMetrics(PageAfter(3), PageAfter(3), "h", {}, 2);

  ASSERT_TRUE(figures.ok());
  EXPECT_EQ(figures->batch_rows_mean, 0);
  EXPECT_EQ(figures->cpu_seconds_per_gigabyte, 0);
  EXPECT_TRUE(figures->stages.empty());
}

TEST(ServerFiguresTest, AreNotTakenAcrossARestart) {
  const MetricsPage restarted =
      Parse("process_start_time_seconds 2000\nlogprobd_rows_total{head=\"h\"} 0\n");

  const auto figures = CompareMetrics(PageAfter(3), restarted, "h", {}, 2);

  EXPECT_EQ(figures.status().code(), absl::StatusCode::kAborted);
}

TEST(ServerFiguresTest, WantALogprobd) {
  const auto figures = CompareMetrics(Parse("up 1\n"), Parse("up 1\n"), "h", {}, 2);

  EXPECT_THAT(std::string(figures.status().message()), HasSubstr("HTTP address of a logprobd"));
}

TEST(ServerPeaksTest, KeepTheLargestOfEachAndAddPriorities) {
  ServerPeaks peaks;

  peaks.Add(Parse("logprobd_queue_rows{head=\"h\",priority=\"high\"} 5\n"
                  "logprobd_queue_rows{head=\"h\",priority=\"low\"} 6\n"
                  "logprobd_queue_rows{head=\"other\",priority=\"low\"} 100\n"
                  "process_resident_memory_bytes 10\n"),
            "h");
  peaks.Add(Parse("logprobd_queue_rows{head=\"h\",priority=\"low\"} 1\n"
                  "process_resident_memory_bytes 20\n"),
            "h");

  EXPECT_EQ(peaks.queue_rows, 11);
  EXPECT_EQ(peaks.resident_bytes, 20);
}

}  // namespace
}  // namespace logprobd::client
