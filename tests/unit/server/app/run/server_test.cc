#include "server/app/run/server.h"

#include <gmock/gmock.h>

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "tests/support/fake_clock.h"
#include "tests/unit/server/app/run/server_fixture.h"

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(ServerTest, IsHealthyButNotReadyBeforeItsWeightsAreLoaded) {
  const std::unique_ptr<Server> server = Create();

  EXPECT_THAT(HttpGet(server->http_port(), "/healthz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"), HasSubstr("loading the weights"));
  EXPECT_EQ(ScoreSoon(*server).get().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServerTest, ShowsEveryGpuOfItsPlanInMetricsAndStatus) {
  parts_.plan_engine = [](const HeadInfo&, const EngineOptions&) -> absl::StatusOr<EnginePlan> {
    return EnginePlan{Device::kCuda,
                      "fake",
                      "a test",
                      {{0, 0, "gpu1", 0, 576}, {0, 1, "gpu4", 576, kVocab}},
                      {{"gpu1", "weights", 5'000}, {"gpu4", "weights", 4'000}}};
  };

  const std::unique_ptr<Server> server = Create();

  EXPECT_THAT(HttpGet(server->http_port(), "/metrics"),
              AllOf(HasSubstr("logprobd_gpu_memory_bytes{gpu=\"1\",kind=\"weights\"} 5000\n"),
                    HasSubstr("logprobd_gpu_memory_bytes{gpu=\"4\",kind=\"weights\"} 4000\n")));
  EXPECT_THAT(HttpGet(server->http_port(), "/"), HasSubstr("ids 576 to 1000 (3 tiles)"));
}

// See row C46 of tests/FAULTS.md.
TEST_F(ServerTest, RefusesRequestsWhileItsWeightsAreBeingRead) {
  const std::unique_ptr<Server> server = Create();
  absl::Notification reading;
  absl::Notification go_on;
  before_load_ = [&] {
    reading.Notify();
    go_on.WaitForNotification();
  };
  std::future<absl::Status> loaded = std::async(std::launch::async, [&] { return server->Load(); });
  reading.WaitForNotification();

  const grpc::Status refused = ScoreSoon(*server).get();

  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(refused.error_message(), "the weights are being loaded");
  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"), HasSubstr("loading the weights"));
  go_on.Notify();
  EXPECT_TRUE(loaded.get().ok());
  EXPECT_TRUE(ScoreSoon(*server).get().ok());
}

TEST_F(ServerTest, ScoresOnceItsWeightsAreLoaded) {
  const std::unique_ptr<Server> server = Create();

  ASSERT_TRUE(server->Load().ok());

  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"), StartsWith("HTTP/1.1 200"));
  EXPECT_TRUE(ScoreSoon(*server).get().ok());
  const std::string metrics = HttpGet(server->http_port(), "/metrics");
  EXPECT_THAT(metrics, HasSubstr("logprobd_ready{head=\"default\"} 1\n"));
  EXPECT_THAT(metrics, HasSubstr("engine=\"fake\""));
  EXPECT_THAT(metrics, HasSubstr("logprobd_weights_load_duration_seconds_count"));
  EXPECT_THAT(HttpGet(server->http_port(), "/"), HasSubstr("engine       fake: a test"));
}

TEST_F(ServerTest, ShowsItsStateAndItsReplicasToBrowsers) {
  num_replicas_ = 2;
  layout_ = {{0, 0, "gpu1", 0, kVocab}, {1, 0, "gpu4", 0, kVocab}};
  const std::unique_ptr<Server> server = Create();
  const std::string loading = HttpGet(server->http_port(), "/?format=html");
  ASSERT_TRUE(server->Load().ok());
  ASSERT_TRUE(ScoreSoon(*server).get().ok());
  const std::string ready = HttpGet(server->http_port(), "/?format=html");
  engines_[1]->SetHealthy(false);

  const std::string degraded = HttpGet(server->http_port(), "/?format=html");

  EXPECT_THAT(loading, HasSubstr("class=\"badge not-ready\">loading the weights"));
  EXPECT_THAT(loading, Not(HasSubstr(">ok<")));
  EXPECT_THAT(ready, HasSubstr("class=\"badge ready\">ready<"));
  EXPECT_THAT(ready, HasSubstr("at most 262,144 rows"));
  EXPECT_THAT(ready, AllOf(HasSubstr(">ok<"), Not(HasSubstr("failed</b>"))));
  EXPECT_THAT(degraded,
              HasSubstr("class=\"badge degraded\">ready, but 1 of 2 replicas has failed<"));
  EXPECT_THAT(degraded, AllOf(HasSubstr(">ok<"), HasSubstr("failed</b>")));
}

// Regression: the metrics showed the version as live from the start.
TEST_F(ServerTest, ReportsNoLiveVersionBeforeItsWeightsAreLoaded) {
  const std::unique_ptr<Server> server = Create();
  EXPECT_THAT(HttpGet(server->http_port(), "/metrics"),
              HasSubstr("logprobd_weights_version{head=\"default\"} 0\n"));

  ASSERT_TRUE(server->Load().ok());

  EXPECT_THAT(HttpGet(server->http_port(), "/metrics"),
              HasSubstr("logprobd_weights_version{head=\"default\"} 1\n"));
}

TEST_F(ServerTest, ReservesTheStagingThatItPlans) {
  const std::unique_ptr<Server> server = Create();
  const auto staging = [&server] {
    for (const MemoryUse& use : server->plan().memory()) {
      if (use.kind == "staging") {
        return use.bytes;
      }
    }
    return int64_t{-1};
  };
  const int64_t planned = staging();

  ASSERT_TRUE(server->Load().ok());

  EXPECT_EQ(planned, 2 * 64 * kHidden * 2);
  EXPECT_EQ(staging(), planned);
}

TEST_F(ServerTest, FinishesWorkInFlightWhenItStops) {
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  engine_->Hold();
  std::future<grpc::Status> call = ScoreSoon(*server);
  engine_->WaitUntilInFlight(1);

  std::future<Server::End> end = std::async(std::launch::async, [&] { return server->Run(); });
  server->RequestStop();
  while (HttpGet(server->http_port(), "/readyz").find("shutting down") == std::string::npos) {
    std::this_thread::yield();
  }
  engine_->Release();

  EXPECT_EQ(end.get(), Server::End::kStopped);
  EXPECT_TRUE(call.get().ok());
}

TEST_F(ServerTest, CancelsWorkThatOutlivesTheGraceTime) {
  options_.grace_s = 0.05;
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  engine_->Hold();
  std::future<grpc::Status> call = ScoreSoon(*server);
  engine_->WaitUntilInFlight(1);

  server->RequestStop();

  EXPECT_EQ(server->Run(), Server::End::kWorkCut);
  EXPECT_FALSE(call.get().ok());
  engine_->Release();  // the program would exit here, but the object's destructor waits
}

TEST_F(ServerTest, StopsWhenItsEngineFails) {
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());

  engine_->SetHealthy(false);

  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"), HasSubstr("the engine has failed"));
  EXPECT_EQ(server->Run(), Server::End::kEngineFailed);
}

TEST_F(ServerTest, ContinuesToServeWhenItLosesOneOfItsReplicas) {
  num_replicas_ = 2;
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());

  engines_[0]->SetHealthy(false);

  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(HttpGet(server->http_port(), "/"),
              HasSubstr("state        ready, but 1 of 2 replicas has failed\n"));
  EXPECT_TRUE(ScoreSoon(*server).get().ok());
  EXPECT_EQ(engines_[1]->num_batches(), 1);
  server->RequestStop();
  EXPECT_EQ(server->Run(), Server::End::kStopped);
}

TEST_F(ServerTest, StopsWhenItHasLostAllOfItsReplicas) {
  num_replicas_ = 2;
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());

  engines_[0]->SetHealthy(false);
  engines_[1]->SetHealthy(false);

  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"), HasSubstr("2 of 2 replicas have failed"));
  EXPECT_EQ(ScoreSoon(*server).get().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(server->Run(), Server::End::kEngineFailed);
}

// E112
TEST_F(ServerTest, AnswersItsCallsAndEndsTheProcessWhenAThreadStandsStill) {
  FakeClock clock;
  std::vector<absl::Duration> exits;
  absl::Notification has_ended;
  parts_.clock = &clock;
  parts_.exit_hung_after = [&](absl::Duration delay) {
    exits.push_back(delay);
    if (delay == absl::ZeroDuration()) {
      has_ended.Notify();
    }
  };
  options_.watchdog_s = 0.5;
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  engine_->Hold();
  std::future<grpc::Status> call = ScoreSoon(*server);
  engine_->WaitUntilInFlight(1);
  const auto heartbeat = parts_.heartbeats->Add({"engine-finish", "default", /*replica=*/0});

  heartbeat->Begin(/*shard=*/1);
  for (int i = 0; i < 10'000 && !has_ended.HasBeenNotified(); ++i) {
    clock.Advance(absl::Milliseconds(250));
    has_ended.WaitForNotificationWithTimeout(absl::Milliseconds(1));
  }

  ASSERT_TRUE(has_ended.HasBeenNotified());
  const grpc::Status status = call.get();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(),
              HasSubstr("thread engine-finish, head default, replica 0, shard 1 has not moved"));
  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"),
              AllOf(StartsWith("HTTP/1.1 503"), HasSubstr("thread engine-finish")));
  EXPECT_THAT(exits, ElementsAre(absl::Seconds(2), absl::ZeroDuration()));
  engine_->Release();
}

TEST_F(ServerTest, LogsTheLossOfEachReplicaOnce) {
  num_replicas_ = 3;
  layout_ = {{.replica = 0, .device = "gpu0"},
             {.replica = 1, .device = "gpu1"},
             {.replica = 2, .device = "gpu2"},
             {.replica = 2, .shard = 1, .device = "gpu3"}};
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  engines_[2]->SetHealthy(false);
  server->RequestStop();

  ::testing::internal::CaptureStderr();
  EXPECT_EQ(server->Run(), Server::End::kStopped);
  const std::string log = ::testing::internal::GetCapturedStderr();

  const std::string line =
      "error a replica has failed head=default replica=2 devices=\"gpu2, gpu3\" replicas_left=2\n";
  EXPECT_THAT(log, HasSubstr(line));
  EXPECT_EQ(log.find("a replica", log.find(line) + line.size()), std::string::npos);
}

TEST_F(ServerTest, CancelsLoadingOnAStopRequest) {
  const std::unique_ptr<Server> server = Create();
  before_load_ = [&server] { server->RequestStop(); };

  EXPECT_TRUE(absl::IsCancelled(server->Load()));
}

TEST_F(ServerTest, DoesNotBecomeReadyAfterAStopRequest) {
  const std::unique_ptr<Server> server = Create();

  server->RequestStop();

  EXPECT_TRUE(absl::IsCancelled(server->Load()));
  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"), StartsWith("HTTP/1.1 503"));
}

TEST_F(ServerTest, ReportsThatAnEngineCannotBeMade) {
  parts_.create_engines =
      [](const HeadWeights&, const EnginePlan&,
         const EngineOptions&) -> absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> {
    return absl::ResourceExhaustedError("8000 bytes for the weight are not available");
  };
  const std::unique_ptr<Server> server = Create();

  EXPECT_EQ(server->Load().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(ServerTest, NamesAPortThatIsInUse) {
  const std::unique_ptr<Server> first = Create();
  for (const bool http : {true, false}) {
    const std::string taken =
        absl::StrCat("127.0.0.1:", http ? first->http_port() : first->grpc_port());
    options_.http = http ? taken : "127.0.0.1:0";
    options_.listen = http ? "127.0.0.1:0" : taken;

    const auto second = Server::Create(options_, parts_);

    EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable) << second.status();
    EXPECT_THAT(std::string(second.status().message()), HasSubstr(taken));
  }
}

TEST_F(ServerTest, RequiresLoopbackUnlessInsecure) {
  options_.http = "0.0.0.0:0";
  const auto refused = Server::Create(options_, parts_);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("--insecure"));

  options_.insecure = true;
  EXPECT_TRUE(Server::Create(options_, parts_).ok());
}

TEST_F(ServerTest, RunsWithoutHttp) {
  options_.http = "";
  const std::unique_ptr<Server> server = Create();

  EXPECT_EQ(server->http_port(), 0);
  EXPECT_TRUE(server->Load().ok());
}

}  // namespace
}  // namespace logprobd::testing
