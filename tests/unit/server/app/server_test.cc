#include "server/app/server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "logprobd/v1/scoring.grpc.pb.h"
#include "logprobd/v1/weights.grpc.pb.h"
#include "tests/support/fake_engine.h"
#include "tests/support/in_memory_head.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;
using ::testing::StartsWith;

constexpr int64_t kHidden = 4;
constexpr int64_t kVocab = 1'000;

/// The answer to a GET, status line and headers included.
std::string HttpGet(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: x\r\n\r\n");
  send(fd, request.data(), request.size(), MSG_NOSIGNAL);
  std::string answer;
  char buffer[4096];
  for (ssize_t got = 0; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
    answer.append(buffer, static_cast<size_t>(got));
  }
  close(fd);
  return answer;
}

v1::ScoreRequest OneRow() {
  v1::ScoreRequest request;
  request.set_dtype(v1::DTYPE_BF16);
  request.set_rows(1);
  request.set_hidden_size(kHidden);
  request.set_targets(std::string(4, '\0'));
  request.set_hidden(std::string(kHidden * 2, '\0'));
  return request;
}

class ServerTest : public ::testing::Test {
 protected:
  ServerTest() {
    options_.model = "/models/fake";
    options_.listen = "127.0.0.1:0";
    options_.http = "127.0.0.1:0";
    options_.batch_rows = 64;
    options_.batch_wait_us = 0;
    parts_.open_model = [](const std::string&,
                           const ModelFolderOptions& options) -> absl::StatusOr<ModelFolderHead> {
      ModelFolderHead head;
      auto weights = testing::MakeRandomHead({.vocab_size = kVocab, .hidden_size = kHidden});
      HeadInfo info = weights->info();
      info.name = options.head_name;
      info.weights_version = options.weights_version;
      head.weights = std::make_unique<testing::InMemoryHead>(
          info, std::vector<std::byte>(static_cast<size_t>(kVocab * kHidden * 2)));
      return head;
    };
    parts_.plan_engine = [this](const HeadInfo&,
                                const EngineOptions&) -> absl::StatusOr<EnginePlan> {
      return EnginePlan{Device::kCpu, "fake", "a test", layout_, {{"host", "weights", 8'000}}};
    };
    parts_.create_engines =
        [this](
            const HeadWeights& weights, const EnginePlan&,
            const EngineOptions&) -> absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> {
      if (before_load_) {
        before_load_();
      }
      if (!refusal_.ok()) {
        return refusal_;
      }
      std::vector<std::byte> row(kHidden * 2);
      const absl::Status read = weights.ReadRows(0, 1, row.data(), kHidden * 2);
      if (!read.ok()) {
        return read;
      }
      std::vector<std::unique_ptr<ScoringEngine>> engines;
      for (int i = 0; i < num_replicas_; ++i) {
        auto engine = std::make_unique<testing::FakeEngine>(
            testing::FakeEngine::Options{.weights_version = weights.info().weights_version});
        engines_.push_back(engine.get());
        engines.push_back(std::move(engine));
      }
      engine_ = engines_.front();
      return engines;
    };
  }

  std::unique_ptr<Server> Create() {
    auto server = Server::Create(options_, parts_);
    EXPECT_TRUE(server.ok()) << server.status();
    return server.ok() ? *std::move(server) : nullptr;
  }

  /// Sends a row and returns the call's status, later.
  static std::future<grpc::Status> ScoreSoon(const Server& server, const std::string& head = "") {
    return std::async(std::launch::async, [port = server.grpc_port(), head] {
      const auto stub = v1::Scoring::NewStub(grpc::CreateChannel(
          absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials()));
      grpc::ClientContext context;
      context.set_wait_for_ready(false);
      v1::ScoreResponse response;
      v1::ScoreRequest request = OneRow();
      request.set_head(head);
      return stub->Score(&context, request, &response);
    });
  }

  /// "rows:bytes" of the limits of each head.
  static std::string LimitsOfHeads(const Server& server) {
    std::string text;
    for (const ServingPlan& plan : server.plan().heads) {
      absl::StrAppend(&text, plan.head.limits.request_rows_max, ":",
                      plan.head.limits.message_bytes_max, " ");
    }
    return text;
  }

  /// Heads "a" and "b" in place of the only one.
  void NameTwoHeads() {
    options_.model = "";
    options_.head_values = {{"model", "a", "/models/a"}, {"model", "b", "/models/b"}};
  }

  ServerOptions options_;
  ServerParts parts_;
  std::function<void()> before_load_;
  absl::Status refusal_;  // of the next engines
  int num_replicas_ = 1;
  std::vector<ShardPlace> layout_;
  std::vector<testing::FakeEngine*> engines_;
  testing::FakeEngine* engine_ = nullptr;  // the first
};

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

// Row C46 of tests/README.md.
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

TEST_F(ServerTest, DrawsItsStateAndItsReplicasForBrowsers) {
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

// The version was live in the metrics from the start.
TEST_F(ServerTest, CountsNoVersionAsLiveBeforeItsWeightsAreLoaded) {
  const std::unique_ptr<Server> server = Create();
  EXPECT_THAT(HttpGet(server->http_port(), "/metrics"),
              HasSubstr("logprobd_weights_version{head=\"default\"} 0\n"));

  ASSERT_TRUE(server->Load().ok());

  EXPECT_THAT(HttpGet(server->http_port(), "/metrics"),
              HasSubstr("logprobd_weights_version{head=\"default\"} 1\n"));
}

TEST_F(ServerTest, PlansTheStagingThatItReserves) {
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

TEST_F(ServerTest, FinishesWhatIsInFlightWhenItStops) {
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

TEST_F(ServerTest, CutsWorkThatOutlivesTheGraceTime) {
  options_.grace_s = 0.05;
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  engine_->Hold();
  std::future<grpc::Status> call = ScoreSoon(*server);
  engine_->WaitUntilInFlight(1);

  server->RequestStop();

  EXPECT_EQ(server->Run(), Server::End::kWorkCut);
  EXPECT_FALSE(call.get().ok());
  engine_->Release();  // the program ends here without waiting; an object has to
}

TEST_F(ServerTest, StopsWhenItsEngineFails) {
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());

  engine_->SetHealthy(false);

  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"), HasSubstr("the engine has failed"));
  EXPECT_EQ(server->Run(), Server::End::kEngineFailed);
}

TEST_F(ServerTest, ServesOnWhenItLosesOneOfItsReplicas) {
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

/// Calls the Weights service of a server with a fresh channel.
std::unique_ptr<v1::Weights::Stub> AdminOf(const Server& server) {
  return v1::Weights::NewStub(grpc::CreateChannel(absl::StrCat("127.0.0.1:", server.admin_port()),
                                                  grpc::InsecureChannelCredentials()));
}

/// Loads "/models/new" and returns how the call ended.
grpc::Status LoadWeights(const Server& server, bool in_place) {
  v1::LoadWeightsRequest request;
  request.set_path("/models/new");
  request.set_commit(true);
  request.set_in_place(in_place);
  grpc::ClientContext context;
  const auto stub = AdminOf(server);
  const auto reader = stub->Load(&context, request);
  v1::LoadWeightsProgress progress;
  while (reader->Read(&progress)) {
  }
  return reader->Finish();
}

TEST_F(ServerTest, ShowsTheVersionThatIsLiveAndScoresWithIt) {
  options_.admin = "127.0.0.1:0";
  options_.weights_root = "/";
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  EXPECT_THAT(HttpGet(server->http_port(), "/"), HasSubstr("version      1\n"));

  const grpc::Status loaded = LoadWeights(*server, /*in_place=*/false);

  ASSERT_TRUE(loaded.ok()) << loaded.error_message();
  EXPECT_THAT(HttpGet(server->http_port(), "/"), HasSubstr("version      2\n"));
  const std::string metrics = HttpGet(server->http_port(), "/metrics");
  EXPECT_THAT(metrics, HasSubstr("logprobd_weights_version{head=\"default\"} 2\n"));
  EXPECT_THAT(metrics, HasSubstr("result=\"committed\"} 1\n"));
  EXPECT_TRUE(ScoreSoon(*server).get().ok());
  ASSERT_EQ(engines_.size(), 2U);
  EXPECT_EQ(engines_[0]->num_batches(), 0);
  EXPECT_EQ(engines_[1]->num_batches(), 1);
}

TEST_F(ServerTest, HasNoWeightsToChangeBeforeTheyAreLoaded) {
  options_.admin = "127.0.0.1:0";
  const std::unique_ptr<Server> server = Create();

  EXPECT_EQ(LoadWeights(*server, false).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServerTest, IsNotReadyWhileItsWeightsAreLostAndReadyAgainOnceSomeAreLoaded) {
  options_.admin = "127.0.0.1:0";
  options_.weights_root = "/";
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  std::future<Server::End> end = std::async(std::launch::async, [&] { return server->Run(); });
  bool fails = true;
  before_load_ = [&] {
    refusal_ = fails ? absl::ResourceExhaustedError("full") : absl::OkStatus();
  };
  const auto await_metric = [&](const std::string& text) {
    while (HttpGet(server->http_port(), "/metrics").find(text) == std::string::npos) {
    }
  };

  EXPECT_EQ(LoadWeights(*server, /*in_place=*/true).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);

  await_metric("logprobd_ready{head=\"default\"} 0\n");
  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"),
              AllOf(StartsWith("HTTP/1.1 503"), HasSubstr("the weights were lost")));
  EXPECT_EQ(ScoreSoon(*server).get().error_code(), grpc::StatusCode::UNAVAILABLE);
  fails = false;
  EXPECT_TRUE(LoadWeights(*server, /*in_place=*/false).ok());
  await_metric("logprobd_ready{head=\"default\"} 1\n");
  EXPECT_TRUE(ScoreSoon(*server).get().ok());
  server->RequestStop();
  EXPECT_EQ(end.get(), Server::End::kStopped);
}

TEST_F(ServerTest, RefusesToStartWithARootThatIsNotThere) {
  options_.weights_root = "/absent";

  const absl::Status status = Server::Create(options_, parts_).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--weights-root"));
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

TEST_F(ServerTest, LogsEachReplicaThatItLosesOnce) {
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

TEST_F(ServerTest, PlansEachHeadWithWhatThoseBeforeItLeave) {
  NameTwoHeads();
  std::vector<std::pair<std::string, int64_t>> planned;
  parts_.plan_engine = [&](const HeadInfo& head,
                           const EngineOptions& options) -> absl::StatusOr<EnginePlan> {
    planned.emplace_back(head.name, TotalBytes(options.reserved, "host"));
    return EnginePlan{Device::kCpu, "fake", "a test", {}, {{"host", "weights", 8'000}}};
  };

  const std::unique_ptr<Server> server = Create();

  constexpr int64_t kStaging = 2 * 64 * kHidden * 2;
  EXPECT_THAT(planned, ElementsAre(Pair("a", 0), Pair("b", 8'000 + kStaging)));
  EXPECT_EQ(TotalBytes(server->plan().memory(), "host"),
            2 * (8'000 + kStaging) + options_.receive_bytes + options_.shared_memory_bytes);
}

TEST_F(ServerTest, NamesTheHeadThatCannotBePlannedOrLoaded) {
  NameTwoHeads();
  const auto plan_engine = parts_.plan_engine;
  parts_.plan_engine = [&](const HeadInfo& head, const EngineOptions& options) {
    return head.name == "b" ? absl::FailedPreconditionError("no room") : plan_engine(head, options);
  };
  EXPECT_EQ(Server::Create(options_, parts_).status().message(),
            "head \"b\": --device auto: no room");

  parts_.plan_engine = plan_engine;
  const std::unique_ptr<Server> server = Create();
  before_load_ = [&] {
    if (!engines_.empty()) {
      server->RequestStop();
    }
  };
  EXPECT_EQ(server->Load().message(), "head \"b\": stopped while loading the weights");
}

TEST_F(ServerTest, ServesEachHeadAsSoonAsItIsLoadedAndIsReadyWhenAllAre) {
  NameTwoHeads();
  const std::unique_ptr<Server> server = Create();
  std::string readyz;
  std::vector<grpc::StatusCode> codes;
  before_load_ = [&] {
    if (!engines_.empty()) {  // b is next
      readyz = HttpGet(server->http_port(), "/readyz");
      for (const char* head : {"a", "b", "c", ""}) {
        codes.push_back(ScoreSoon(*server, head).get().error_code());
      }
    }
  };

  ASSERT_TRUE(server->Load().ok());

  EXPECT_THAT(readyz, StartsWith("HTTP/1.1 503"));
  EXPECT_THAT(readyz, HasSubstr("loading the weights of b (1 of 2 heads loaded)"));
  EXPECT_THAT(codes, ElementsAre(grpc::StatusCode::OK, grpc::StatusCode::UNAVAILABLE,
                                 grpc::StatusCode::NOT_FOUND, grpc::StatusCode::INVALID_ARGUMENT));
  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"), StartsWith("HTTP/1.1 200"));
  EXPECT_TRUE(ScoreSoon(*server, "b").get().ok());
  EXPECT_EQ(engines_[1]->num_batches(), 1);
  EXPECT_THAT(HttpGet(server->http_port(), "/"),
              AllOf(HasSubstr("head         a\n"), HasSubstr("head         b\n"),
                    HasSubstr("all heads    a, b\n")));
  EXPECT_THAT(HttpGet(server->http_port(), "/metrics"),
              AllOf(HasSubstr("logprobd_ready{head=\"a\"} 1\n"),
                    HasSubstr("logprobd_ready{head=\"b\"} 1\n"),
                    HasSubstr("logprobd_host_memory_bytes{kind=\"staging\"} 2048\n")));
}

TEST_F(ServerTest, HeadsThatShareADeviceTakeTurns) {
  NameTwoHeads();
  layout_ = {{0, 0, "cpu"}};
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  engines_[0]->Hold();
  std::future<grpc::Status> first = ScoreSoon(*server, "a");
  engines_[0]->WaitUntilInFlight(1);
  std::future<grpc::Status> second = ScoreSoon(*server, "a");
  engines_[0]->WaitUntilInFlight(2);
  std::future<grpc::Status> waiting = ScoreSoon(*server, "b");
  while (HttpGet(server->http_port(), "/metrics")
             .find("logprobd_queue_rows{head=\"b\",priority=\"normal\"} 1\n") ==
         std::string::npos) {
    std::this_thread::yield();
  }
  EXPECT_EQ(engines_[1]->num_batches(), 0);

  engines_[0]->ReleaseOne();

  EXPECT_TRUE(waiting.get().ok());
  engines_[0]->Release();
  EXPECT_TRUE(first.get().ok() && second.get().ok());
}

// Loading a team of GPUs launches kernels that wait for each other, and so does serving one.
TEST_F(ServerTest, ServesNoHeadWhileTeamsThatShareGpusAreLoaded) {
  NameTwoHeads();
  parts_.plan_engine = [](const HeadInfo&, const EngineOptions&) -> absl::StatusOr<EnginePlan> {
    return EnginePlan{Device::kCuda,
                      "fake",
                      "a test",
                      {{0, 0, "gpu0", 0, 576}, {0, 1, "gpu1", 576, kVocab}},
                      {{"gpu0", "weights", 5'000}}};
  };
  const std::unique_ptr<Server> server = Create();
  grpc::StatusCode code = grpc::StatusCode::OK;
  before_load_ = [&] {
    if (!engines_.empty()) {
      code = ScoreSoon(*server, "a").get().error_code();
    }
  };

  ASSERT_TRUE(server->Load().ok());

  EXPECT_EQ(code, grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(ScoreSoon(*server, "a").get().ok());
  EXPECT_TRUE(ScoreSoon(*server, "b").get().ok());
}

TEST_F(ServerTest, NamesAllHeadsInTheReadyLine) {
  NameTwoHeads();
  const std::unique_ptr<Server> server = Create();

  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(server->Load().ok());
  const std::string log = ::testing::internal::GetCapturedStderr();

  EXPECT_THAT(log, HasSubstr(" ready head=\"a, b\" engine=fake grpc=127.0.0.1:"));
}

TEST_F(ServerTest, ServesTheOtherHeadsWhenOneIsLost) {
  NameTwoHeads();
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  engines_[1]->SetHealthy(false);
  server->RequestStop();

  const std::string readyz = HttpGet(server->http_port(), "/readyz");
  EXPECT_THAT(readyz, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(readyz, HasSubstr("ready, but head b: the engine has failed"));
  EXPECT_EQ(ScoreSoon(*server, "b").get().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(ScoreSoon(*server, "a").get().ok());
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(server->Run(), Server::End::kStopped);
  const std::string log = ::testing::internal::GetCapturedStderr();
  const std::string line =
      "error the engine has failed: this head is not served until a restart head=b\n";
  EXPECT_THAT(log, HasSubstr(line));
  EXPECT_EQ(log.find("the engine has failed", log.find(line) + line.size()), std::string::npos);
  EXPECT_TRUE(server->HasLostReplica());
}

TEST_F(ServerTest, StopsWhenItHasLostAllOfItsHeads) {
  NameTwoHeads();
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());

  engines_[0]->SetHealthy(false);
  engines_[1]->SetHealthy(false);

  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"),
              HasSubstr("head a: the engine has failed; head b: the engine has failed"));
  EXPECT_EQ(server->Run(), Server::End::kEngineFailed);
}

TEST_F(ServerTest, AppliesReloadedLimitsToAllHeads) {
  NameTwoHeads();
  ServerOptions wanted = options_;
  wanted.queue_bytes = 1'000'000;
  wanted.request_rows = 7;
  wanted.batch_rows = 32;
  absl::Notification is_read;
  parts_.read_options = [&]() -> absl::StatusOr<ServerOptions> {
    is_read.Notify();
    return wanted;
  };
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  ::testing::internal::CaptureStderr();
  server->RequestReload();

  std::future<Server::End> end = std::async(std::launch::async, [&] { return server->Run(); });
  is_read.WaitForNotification();
  while (LimitsOfHeads(*server) != "7:250000 7:250000 ") {
    std::this_thread::yield();
  }
  server->RequestStop();

  EXPECT_EQ(end.get(), Server::End::kStopped);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("info SIGHUP applied=\"request-rows, queue-bytes\"\n"));
  EXPECT_THAT(log, HasSubstr("warning SIGHUP: changed settings need a restart settings="
                             "batch-rows\n"));
}

TEST_F(ServerTest, KeepsItsSettingsWhenReloadedOnesAreWrong) {
  std::atomic<int> num_read = 0;
  parts_.read_options = [&]() -> absl::StatusOr<ServerOptions> {
    const int number = num_read++;
    if (number == 0) {
      return absl::InvalidArgumentError("file c.toml: key x is unknown");
    }
    ServerOptions wanted = options_;
    wanted.queue_bytes = number == 1 ? int64_t{2} << 30 : wanted.queue_bytes;
    return wanted;
  };
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  ::testing::internal::CaptureStderr();

  std::future<Server::End> end = std::async(std::launch::async, [&] { return server->Run(); });
  for (int number = 1; number <= 3; ++number) {  // one is done when the next is read
    server->RequestReload();
    while (num_read < number) {
      std::this_thread::yield();
    }
  }
  server->RequestStop();

  EXPECT_EQ(end.get(), Server::End::kStopped);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log,
              HasSubstr("error SIGHUP: all settings stay as they are reason=\"file c.toml: key "
                        "x is unknown\"\n"));
  EXPECT_THAT(log, HasSubstr("all settings stay as they are reason=\"--receive-bytes 2GiB must be "
                             "larger than --queue-bytes 2GiB"));
  EXPECT_EQ(LimitsOfHeads(*server), "65536:67108864 ");
}

TEST_F(ServerTest, GivesUpLoadingWhenItIsToStop) {
  const std::unique_ptr<Server> server = Create();
  before_load_ = [&server] { server->RequestStop(); };

  EXPECT_TRUE(absl::IsCancelled(server->Load()));
}

TEST_F(ServerTest, DoesNotBecomeReadyWhenItIsToStopAlready) {
  const std::unique_ptr<Server> server = Create();

  server->RequestStop();

  EXPECT_TRUE(absl::IsCancelled(server->Load()));
  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"), StartsWith("HTTP/1.1 503"));
}

TEST_F(ServerTest, ReportsAnEngineThatCannotBeMade) {
  parts_.create_engines =
      [](const HeadWeights&, const EnginePlan&,
         const EngineOptions&) -> absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> {
    return absl::ResourceExhaustedError("8000 bytes for the weight are not there");
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

TEST_F(ServerTest, WantsLoopbackUnlessToldOtherwise) {
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
}  // namespace logprobd
