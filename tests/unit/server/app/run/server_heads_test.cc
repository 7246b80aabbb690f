#include <gmock/gmock.h>

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/app/run/server.h"
#include "tests/unit/server/app/run/server_fixture.h"

// Tests of a server with several heads.

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::StartsWith;

using ServerHeadsTest = ServerTest;

TEST_F(ServerHeadsTest, PlansEachHeadWithTheMemoryThatEarlierHeadsLeave) {
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

TEST_F(ServerHeadsTest, NamesTheHeadThatCannotBePlannedOrLoaded) {
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

TEST_F(ServerHeadsTest, ServesEachHeadAsSoonAsItIsLoadedAndIsReadyWhenAllAre) {
  NameTwoHeads();
  const std::unique_ptr<Server> server = Create();
  std::string readyz;
  std::vector<grpc::StatusCode> codes;
  before_load_ = [&] {
    if (!engines_.empty()) {  // b is loaded next
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

TEST_F(ServerHeadsTest, LetsHeadsThatShareADeviceTakeTurns) {
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

// Both loading and serving a team of GPUs launch kernels that wait for each other.
TEST_F(ServerHeadsTest, ServesNoHeadWhileHeadsOnSharedGpusAreLoaded) {
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

TEST_F(ServerHeadsTest, NamesAllHeadsInTheReadyLine) {
  NameTwoHeads();
  const std::unique_ptr<Server> server = Create();

  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(server->Load().ok());
  const std::string log = ::testing::internal::GetCapturedStderr();

  EXPECT_THAT(log, HasSubstr(" ready head=\"a, b\" engine=fake grpc=127.0.0.1:"));
}

TEST_F(ServerHeadsTest, ServesTheOtherHeadsWhenOneIsLost) {
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
  EXPECT_TRUE(server->MayHang());
}

TEST_F(ServerHeadsTest, StopsWhenAllHeadsAreLost) {
  NameTwoHeads();
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());

  engines_[0]->SetHealthy(false);
  engines_[1]->SetHealthy(false);

  EXPECT_THAT(HttpGet(server->http_port(), "/readyz"),
              HasSubstr("head a: the engine has failed; head b: the engine has failed"));
  EXPECT_EQ(server->Run(), Server::End::kEngineFailed);
}

}  // namespace
}  // namespace logprobd::testing
