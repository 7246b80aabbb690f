#include <gmock/gmock.h>

#include <future>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "logprobd/v1/weights.grpc.pb.h"
#include "server/app/heads/version_releaser.h"
#include "server/app/run/server.h"
#include "tests/support/fake_clock.h"
#include "tests/unit/server/app/run/server_fixture.h"

// Tests of a server whose weights change while it serves.

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using ServerWeightsTest = ServerTest;

/// Returns a stub of the server's Weights service on a new channel.
std::unique_ptr<v1::Weights::Stub> AdminOf(const Server& server) {
  return v1::Weights::NewStub(
      grpc::CreateChannel(server.admin_address(), grpc::InsecureChannelCredentials()));
}

/// Loads "/models/new" and returns the status of the call.
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

TEST_F(ServerWeightsTest, ShowsTheLiveVersionAndScoresWithIt) {
  options_.admin = kAutoPath;
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

TEST_F(ServerWeightsTest, ReservesStagingForTwoVersionsAtStartAndNoneLater) {
  options_.admin = kAutoPath;
  options_.weights_root = "/";
  const std::unique_ptr<Server> server = Create();
  constexpr int64_t kBytes = 2 * 2 * 64 * kHidden * 2;
  const std::string reserved =
      absl::StrCat("logprobd_host_memory_bytes{kind=\"staging\"} ", kBytes, "\n");
  EXPECT_THAT(HttpGet(server->http_port(), "/metrics"), HasSubstr(reserved));
  ASSERT_TRUE(server->Load().ok());
  EXPECT_EQ(engines_[0]->staging_bytes(), kBytes);

  for (const bool in_place : {false, false, true, false}) {
    ASSERT_TRUE(LoadWeights(*server, in_place).ok());

    EXPECT_EQ(engines_.back()->staging_bytes(), 0);
    EXPECT_THAT(HttpGet(server->http_port(), "/metrics"), HasSubstr(reserved));
  }
  EXPECT_TRUE(ScoreSoon(*server).get().ok());
}

TEST_F(ServerWeightsTest, RefusesToChangeWeightsBeforeTheyAreLoaded) {
  options_.admin = kAutoPath;
  const std::unique_ptr<Server> server = Create();

  EXPECT_EQ(LoadWeights(*server, false).error_code(), grpc::StatusCode::UNAVAILABLE);
}

// Regression: new weights took the memory planned for a head that was not loaded yet.
TEST_F(ServerWeightsTest, LoadsNewWeightsOnlyAfterAllHeadsAreLoaded) {
  NameTwoHeads();
  options_.admin = kAutoPath;
  options_.weights_root = "/";
  const std::unique_ptr<Server> server = Create();
  const auto stub = AdminOf(*server);
  grpc::ClientContext context;
  v1::LoadWeightsRequest request;
  request.set_head("a");
  request.set_path("/models/new");
  v1::LoadWeightsProgress progress;
  std::unique_ptr<grpc::ClientReader<v1::LoadWeightsProgress>> reader;
  std::string phases;
  before_load_ = [&] {
    if (engines_.size() == 1) {  // b is loaded next
      reader = stub->Load(&context, request);
      for (int i = 0; i < 2 && reader->Read(&progress); ++i) {
        absl::StrAppend(&phases, progress.phase(), " ");
      }
    }
  };

  ASSERT_TRUE(server->Load().ok());

  EXPECT_EQ(phases, "checking checking ");
  while (reader->Read(&progress)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(engines_.size(), 3U);
}

TEST_F(ServerWeightsTest, IsNotReadyWhileItsWeightsAreLostAndReadyAgainAfterALoad) {
  options_.admin = kAutoPath;
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

// The process then ends without destructors, which would wait for the device.
TEST_F(ServerWeightsTest, MayHangWhileADroppedVersionIsNotDestroyed) {
  FakeClock clock;
  absl::Notification end;
  parts_.clock = &clock;
  options_.admin = kAutoPath;
  options_.weights_root = "/";
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  ASSERT_TRUE(LoadWeights(*server, /*in_place=*/false).ok());
  engines_[0]->BlockDestructor(end);
  EXPECT_FALSE(server->MayHang());

  std::future<grpc::Status> discarded = std::async(std::launch::async, [&] {
    v1::DiscardWeightsRequest request;
    request.set_previous(true);
    v1::WeightsResponse response;
    grpc::ClientContext context;
    return AdminOf(*server)->Discard(&context, request, &response);
  });
  clock.WaitForWaiter(clock.Now() + VersionReleaser::kWaitMax);
  EXPECT_TRUE(server->MayHang());

  end.Notify();
  EXPECT_TRUE(discarded.get().ok());
  EXPECT_FALSE(server->MayHang());
}

TEST_F(ServerWeightsTest, RefusesToStartWithAMissingWeightsRoot) {
  options_.weights_root = "/absent";

  const absl::Status status = Server::Create(options_, parts_).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--weights-root"));
}

}  // namespace
}  // namespace logprobd::testing
