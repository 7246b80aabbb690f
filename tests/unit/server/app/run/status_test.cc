#include "server/app/run/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/support/fake_clock.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

ServerStatus StatusOf(const std::vector<std::string>& heads) {
  ServerStatus status;
  status.version = "1.2.3";
  status.state = ServingState::kReady;
  for (const std::string& name : heads) {
    HeadStatus head;
    head.info.name = name;
    head.state_text = "state of " + name;
    head.queue_rows_max = 100;
    status.heads.push_back(head);
  }
  return status;
}

using Phase = ServerHealth::Phase;

ServerHealth HealthOf(Phase phase, const std::vector<ServerHealth::Head>& heads) {
  return {.phase = phase, .heads = heads};
}

TEST(ServerHealthTest, NamesTheHeadThatIsLoadingIfThereAreSeveral) {
  ServerHealth health = HealthOf(Phase::kLoading, {{.name = "a"}});
  EXPECT_EQ(NotReadyReason(health), "loading the weights");
  health.progress = "42 % of 296.8 MiB";
  EXPECT_EQ(NotReadyReason(health), "loading the weights 42 % of 296.8 MiB");

  health.heads = {{.name = "a", .is_loaded = true}, {.name = "b"}};

  EXPECT_EQ(NotReadyReason(health),
            "loading the weights of b (1 of 2 heads loaded) 42 % of 296.8 MiB");
  EXPECT_EQ(StateOf(health), std::pair(ServingState::kNotReady, NotReadyReason(health)));
}

TEST(ServerHealthTest, IsReadyWhileAnyHeadIsAndSaysWhatHasFailed) {
  ServerHealth health =
      HealthOf(Phase::kServing, {{.name = "a", .is_loaded = true, .is_ready = true},
                                 {.name = "b", .is_loaded = true, .is_ready = true}});
  EXPECT_EQ(StateOf(health), std::pair(ServingState::kReady, std::string("ready")));

  health.heads[1].is_ready = false;
  health.heads[1].failure = "the engine has failed";
  EXPECT_EQ(StateOf(health), std::pair(ServingState::kDegraded,
                                       std::string("ready, but head b: the engine has failed")));

  health.heads[0].is_ready = false;
  health.heads[0].failure = "1 of 2 replicas has failed";
  EXPECT_EQ(
      StateOf(health),
      std::pair(ServingState::kNotReady,
                std::string("head a: 1 of 2 replicas has failed; head b: the engine has failed")));
}

TEST(ServerHealthTest, LeavesOutTheNameOfTheOnlyHead) {
  const ServerHealth health = HealthOf(
      Phase::kServing, {{.name = "a", .is_loaded = true, .failure = "the engine has failed"}});

  EXPECT_EQ(NotReadyReason(health), "the engine has failed");
}

TEST(ServerHealthTest, AHangIsTheReasonInEveryPhase) {
  ServerHealth health =
      HealthOf(Phase::kStopping, {{.name = "a", .is_loaded = true, .is_ready = true}});
  EXPECT_EQ(NotReadyReason(health), "shutting down");

  health.hang = "thread main has not moved for 120 s";

  EXPECT_EQ(NotReadyReason(health), "thread main has not moved for 120 s");
}

class StatusBoardTest : public ::testing::Test {
 protected:
  void Score(const std::string& head, int calls, double seconds,
             absl::StatusCode code = absl::StatusCode::kOk) {
    for (int i = 0; i < calls; ++i) {
      metrics_.RecordRequest(Metrics::Method::kScore, head, code, seconds,
                             Metrics::Transport::kTcp);
      metrics_.RecordRows(head, 10, 0, 0);
    }
  }

  testing::FakeClock clock_;
  Metrics metrics_{{.heads = {"a", "b"}, .gpus = {1, 0}}};
  StatusBoard board_{metrics_, clock_};
};

TEST_F(StatusBoardTest, TakesRatesSinceTheStartDuringTheFirstWindow) {
  Score("a", 30, 0.010);
  Score("b", 10, 0.010, absl::StatusCode::kInternal);
  clock_.Advance(absl::Seconds(2));

  const StatusPage page = board_.Page(StatusOf({"a", "b"}));

  EXPECT_DOUBLE_EQ(page.window_seconds, 2);
  EXPECT_DOUBLE_EQ(page.uptime_seconds, 2);
  ASSERT_EQ(page.heads.size(), 2);
  EXPECT_DOUBLE_EQ(page.heads[0].requests_per_second, 15);
  EXPECT_DOUBLE_EQ(page.heads[0].rows_per_second, 150);
  EXPECT_DOUBLE_EQ(page.heads[0].faults_per_second, 0);
  EXPECT_DOUBLE_EQ(page.heads[1].faults_per_second, 5);
  EXPECT_EQ(page.heads[0].latency.count, 30);
  // The median is interpolated within the bucket of 10 ms.
  EXPECT_NEAR(page.heads[0].latency.p50_seconds, 0.0121637, 1e-7);
  EXPECT_EQ(page.heads[1].state_text, "state of b");
  EXPECT_EQ(page.heads[1].queue_rows_max, 100);
}

TEST_F(StatusBoardTest, IgnoresRequestsBeforeTheWindow) {
  Score("a", 1'000, 9);  // before the window
  for (int i = 0; i < 30; ++i) {
    clock_.Advance(StatusBoard::kSamplePeriod);
    board_.Sample();
  }
  Score("a", 120, 0.001);

  const StatusPage page = board_.Page(StatusOf({"a"}));

  EXPECT_DOUBLE_EQ(page.window_seconds, 60);
  EXPECT_DOUBLE_EQ(page.heads[0].requests_per_second, 2);
  EXPECT_EQ(page.heads[0].latency.count, 120);
  EXPECT_LT(page.heads[0].latency.p99_seconds, 0.002);
}

TEST_F(StatusBoardTest, SamplesNoMoreOftenThanItsPeriod) {
  Score("a", 10, 0.001);
  clock_.Advance(absl::Seconds(1));
  board_.Sample();  // too soon: the first sample stays the only one
  clock_.Advance(StatusBoard::kWindow);

  const StatusPage page = board_.Page(StatusOf({"a"}));

  EXPECT_DOUBLE_EQ(page.window_seconds, 61);
  EXPECT_EQ(page.heads[0].latency.count, 10);
}

TEST_F(StatusBoardTest, ReportsZeroRatesAtTheStart) {
  Score("a", 5, 0.001);

  const StatusPage page = board_.Page(StatusOf({"a"}));

  EXPECT_EQ(page.window_seconds, 0);
  EXPECT_EQ(page.heads[0].requests_per_second, 0);
  EXPECT_EQ(page.heads[0].latency.count, 5);
}

TEST_F(StatusBoardTest, ExcludesOtherCallsFromTheLatency) {
  Score("a", 10, 0.001);
  metrics_.RecordRequest(Metrics::Method::kVerify, "a", absl::StatusCode::kOk, 30,
                         Metrics::Transport::kTcp);

  const StatusPage page = board_.Page(StatusOf({"a"}));

  EXPECT_EQ(page.heads[0].latency.count, 10);
}

TEST_F(StatusBoardTest, ListsStagesInTheOrderOfProcessing) {
  metrics_.RecordStage(Metrics::Stage::kKernel, 0.25);

  const StatusPage page = board_.Page(StatusOf({"a"}));

  std::vector<std::string> names;
  for (const LatencySummary& stage : page.stages) {
    names.push_back(stage.name);
  }
  EXPECT_THAT(names,
              ElementsAre("receive", "copy", "queue", "h2d", "kernel", "combine", "d2h", "reply"));
  EXPECT_EQ(page.stages[4].count, 1);
  EXPECT_NEAR(page.stages[4].p50_seconds, 0.3117428, 1e-7);  // in the bucket of 0.25 s
  EXPECT_EQ(page.stages[5].count, 0);
}

TEST_F(StatusBoardTest, ShowsTheQueueAndRefusals) {
  metrics_.SetQueue("a", Priority::kHigh, {.rows = 7, .bytes = 70, .requests = 2});
  metrics_.SetQueue("a", Priority::kLow, {.rows = 3, .bytes = 30, .requests = 1});
  metrics_.SetQueueOldestAge("a", 1.5);
  metrics_.SetInflightBytesLimit(1'000);
  metrics_.RecordRejection(Rejection::kQueueRows);
  metrics_.RecordRejection(Rejection::kClientShare);
  metrics_.RecordRejection(Rejection::kInvalid);  // an error of the client
  clock_.Advance(absl::Seconds(1));

  const StatusPage page = board_.Page(StatusOf({"a"}));

  EXPECT_EQ(page.heads[0].queue_rows, 10);
  EXPECT_EQ(page.heads[0].queue_requests, 3);
  EXPECT_DOUBLE_EQ(page.heads[0].queue_oldest_seconds, 1.5);
  EXPECT_EQ(page.inflight_bytes, 100);
  EXPECT_EQ(page.inflight_bytes_max, 1'000);
  EXPECT_DOUBLE_EQ(page.refused_per_second, 2);
}

TEST_F(StatusBoardTest, SumsHostMemoryByKindAndTakesGpusFromTheMetrics) {
  ServerStatus status = StatusOf({"a"});
  status.memory = {{"host", "staging", 100}, {"host", "staging", 50, true},
                   {"host", "receive", 900}, {"host", "shared", 800},
                   {"gpu1", "weights", 1},   {"elsewhere", "weights", 20}};
  metrics_.SetMemory({{"gpu1", "weights", 4'000}});
  metrics_.SetMemory({{"gpu1", "weights", 3'000}});

  const StatusPage page = board_.Page(status);

  ASSERT_EQ(page.memory.size(), 4);
  EXPECT_EQ(page.memory[0].place, "host");
  ASSERT_EQ(page.memory[0].parts.size(), 3);
  EXPECT_EQ(page.memory[0].parts[0].bytes, 150);
  EXPECT_FALSE(page.memory[0].parts[0].is_bound);
  EXPECT_TRUE(page.memory[0].parts[1].is_bound);
  EXPECT_TRUE(page.memory[0].parts[2].is_bound);  // regression: it was drawn as reserved memory
  EXPECT_EQ(page.memory[1].place, "elsewhere");
  EXPECT_EQ(page.memory[2].place, "gpu0");
  EXPECT_EQ(page.memory[3].place, "gpu1");
  EXPECT_EQ(page.memory[3].parts[0].kind, "weights");
  EXPECT_EQ(page.memory[3].parts[0].bytes, 3'000);
  EXPECT_EQ(page.memory[3].parts[0].peak_bytes, 4'000);
}

TEST_F(StatusBoardTest, ShowsTheWorkOfEachGpu) {
  metrics_.RecordFlops(1, 2e12, 0.5);
  clock_.Advance(absl::Seconds(2));

  const StatusPage page = board_.Page(StatusOf({"a"}));

  ASSERT_EQ(page.gpus.size(), 2);
  EXPECT_EQ(page.gpus[0].gpu, 0);
  EXPECT_EQ(page.gpus[0].tflops_per_second, 0);
  EXPECT_EQ(page.gpus[1].gpu, 1);
  EXPECT_DOUBLE_EQ(page.gpus[1].tflops_per_second, 1);
  EXPECT_DOUBLE_EQ(page.gpus[1].busy_ratio, 0.25);
}

TEST_F(StatusBoardTest, WarnsOfAGpuWhoseSumsDiffer) {
  ServerStatus status = StatusOf({"a"});
  status.warnings = {"a warning of the plan"};
  metrics_.SetUnequalSums(1);

  const StatusPage page = board_.Page(status);

  EXPECT_THAT(page.warnings, ElementsAre("a warning of the plan",
                                         StartsWith("GPU 1 sums products in another order")));
}

TEST_F(StatusBoardTest, FindsAHeadWhoseNameIsNotSafeAsALabel) {
  Metrics metrics({.heads = {"a\nb"}});
  StatusBoard board(metrics, clock_);
  metrics.RecordRows("a\nb", 10, 0, 2);

  const StatusPage page = board.Page(StatusOf({"a\nb"}));

  EXPECT_EQ(page.heads[0].nonfinite_rows, 2);
}

TEST(LoadProgressTest, ReportsThePercentageRead) {
  const testing::FakeClock clock;
  LoadProgress progress(false, clock);
  EXPECT_EQ(progress.Text(), "");

  progress.Update(25 << 20, 100 << 20);

  EXPECT_EQ(progress.Text(), "25 % of 100.0 MiB");
  progress.Finish();
  EXPECT_EQ(progress.Text(), "");  // regression: the next head started at 100 %
}

TEST(LoadProgressTest, DrawsOnATerminalAtMostTenTimesASecond) {
  testing::FakeClock clock;
  LoadProgress progress(true, clock);
  ::testing::internal::CaptureStderr();

  progress.Update(1, 100);
  progress.Update(2, 100);
  clock.Advance(absl::Milliseconds(100));
  progress.Update(3, 100);
  progress.Finish();
  progress.Finish();

  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "\r\033[Kloading the weights: 1 % of 100 B"
            "\r\033[Kloading the weights: 3 % of 100 B"
            "\r\033[K");
}

TEST(LoadProgressTest, IsSilentWithoutATerminal) {
  const testing::FakeClock clock;
  LoadProgress progress(false, clock);
  ::testing::internal::CaptureStderr();

  progress.Update(1, 100);
  progress.Finish();

  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(ListenerWarningsTest, AnAddressForOtherHostsHasTheHolesOfAnOldGrpc) {
  ServerOptions options;
  options.http = "0.0.0.0:9470";  // not served by gRPC
  options.tls_cert = "/cert";
  options.tls_key = "/key";
  options.tokens = "/tokens.toml";
  EXPECT_THAT(ListenerWarnings(options, "1.51.1"), ElementsAre(StartsWith("--http is open")));
  options.http = "";
  options.listen = "0.0.0.0:8470";

  EXPECT_THAT(ListenerWarnings(options, "1.51.1"),
              ElementsAre(AllOf(StartsWith("--listen can be reached"), HasSubstr("gRPC 1.51.1"),
                                HasSubstr("CVE-2023-33953"))));
  EXPECT_THAT(ListenerWarnings(options, "1.83.0"), IsEmpty());
  options.listen = "127.0.0.1:8470";
  EXPECT_THAT(ListenerWarnings(options, "1.51.1"), IsEmpty());
}

TEST(ListenerWarningsTest, AListenerThatOnlyInsecureOpensIsNamedWithAnyGrpc) {
  ServerOptions options;
  options.listen = "0.0.0.0:8470";

  EXPECT_THAT(ListenerWarnings(options, "1.83.0"),
              ElementsAre("--listen is open to everyone who reaches it, because --insecure is "
                          "given"));
}

}  // namespace
}  // namespace logprobd
