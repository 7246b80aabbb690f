#include "server/transport/info_calls.h"

#include <chrono>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "tests/support/fake_client_memory.h"
#include "tests/support/fake_clock.h"
#include "tests/support/temp_folder.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

TEST(ListHeadsTest, ReportsAllInfoOfAHead) {
  GrpcServer::Options options = TestServerOptions();
  const TempFolder folder;
  options.unix_socket = folder.path("socket");
  TransportServer server(options);
  grpc::ClientContext context;
  v1::ListHeadsResponse response;

  ASSERT_TRUE(server.stub->ListHeads(&context, {}, &response).ok());

  EXPECT_EQ(response.server_version(), "test");
  ASSERT_EQ(response.heads_size(), 1);
  const v1::Head& head = response.heads(0);
  EXPECT_EQ(head.name(), "fake");
  EXPECT_EQ(head.model_type(), "fake_model");
  EXPECT_EQ(head.vocab_size(), 100U);
  EXPECT_EQ(head.vocab_rows(), 104U);
  EXPECT_EQ(head.hidden_size(), 8U);
  EXPECT_EQ(head.dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(head.weights_version(), 3U);
  EXPECT_TRUE(head.ready());
  EXPECT_FALSE(head.tied());
  EXPECT_EQ(head.scale(), 0.5F);
  EXPECT_EQ(head.softcap(), 30.0F);
  EXPECT_FALSE(head.has_bias());
  EXPECT_EQ(head.tensor(), "lm_head.weight");
  EXPECT_EQ(head.engine(), "fake/none");
  EXPECT_EQ(head.weight_bytes(), 1'664U);
  EXPECT_EQ(head.limits().message_bytes_max(), 1U << 20);
  EXPECT_EQ(head.limits().request_rows_max(), 64U);
  EXPECT_EQ(head.limits().top_k_max(), 16U);
  EXPECT_EQ(head.limits().candidates_max(), 256U);
  EXPECT_EQ(head.limits().segments_max(), 32U);
  EXPECT_EQ(head.limits().stream_window(), 4U);
  EXPECT_THAT(head.transports(), ElementsAre("tcp", "unix", "shm"));
  ASSERT_EQ(head.layout_size(), 2);
  EXPECT_EQ(head.layout(0).device(), "gpu1");
  EXPECT_EQ(head.layout(1).replica(), 1U);
  EXPECT_EQ(head.layout(1).shard(), 0U);
  EXPECT_EQ(head.layout(1).device(), "gpu0");
  EXPECT_EQ(head.layout(1).vocab_begin(), 0U);
  EXPECT_EQ(head.layout(1).vocab_end(), 100U);
  EXPECT_EQ(response.local().boot_id().size(), 36U);
  EXPECT_EQ(response.local().grpc_path(), options.unix_socket);
  EXPECT_EQ(response.local().control_path(), options.unix_socket + ".control");
  EXPECT_TRUE(response.local().shared_memory());
  EXPECT_FALSE(response.local().cuda_ipc());
}

TEST(ListHeadsTest, ReportsEachHeadAsItIs) {
  HeadInfo info = FakeHeadInfo();
  info.dtype = Dtype::kF32;
  info.tied = true;
  info.has_bias = true;
  info.warnings = {"one", "two"};
  info.layout = {{2, 3, "gpu5", 192, 384}};
  TransportServer server(TestServerOptions(), info);
  HeadInfo other = FakeHeadInfo();
  other.name = "other";
  server.registry.Add(std::make_shared<FakeHead>(other));
  grpc::ClientContext context;
  v1::ListHeadsResponse response;

  ASSERT_TRUE(server.stub->ListHeads(&context, {}, &response).ok());

  ASSERT_EQ(response.heads_size(), 2);
  EXPECT_EQ(response.heads(1).name(), "other");
  EXPECT_FALSE(response.heads(1).tied() || response.heads(1).has_bias());
  const v1::Head& head = response.heads(0);
  EXPECT_EQ(head.dtype(), v1::DTYPE_F32);
  EXPECT_TRUE(head.tied() && head.has_bias());
  EXPECT_THAT(head.warnings(), ElementsAre("one", "two"));
  ASSERT_EQ(head.layout_size(), 1);
  EXPECT_EQ(head.layout(0).replica(), 2U);
  EXPECT_EQ(head.layout(0).shard(), 3U);
  EXPECT_EQ(head.layout(0).vocab_begin(), 192U);
  EXPECT_EQ(head.layout(0).vocab_end(), 384U);
}

TEST(ListHeadsTest, ReportsThatGpuMemoryCanBeShared) {
  GrpcServer::Options options = TestServerOptions();
  const TempFolder folder;
  FakeDeviceMemory devices{64};
  options.unix_socket = folder.path("socket");
  options.devices = &devices;
  TransportServer server(options);
  grpc::ClientContext context;
  v1::ListHeadsResponse response;

  ASSERT_TRUE(server.stub->ListHeads(&context, {}, &response).ok());

  EXPECT_TRUE(response.local().cuda_ipc());
  EXPECT_THAT(response.heads(0).transports(), ElementsAre("tcp", "unix", "shm", "cuda_ipc"));
}

TEST(ListHeadsTest, ReportsWhatSameHostClientsMayNotUse) {
  GrpcServer::Options options = TestServerOptions();
  const TempFolder folder;
  options.unix_socket = folder.path("socket");
  options.shared_memory.bytes_max = 0;
  TransportServer without_memory(options);
  TransportServer without_socket;
  for (const auto& [server, transports] :
       {std::pair(&without_memory, std::vector<std::string>{"tcp", "unix"}),
        std::pair(&without_socket, std::vector<std::string>{"tcp"})}) {
    grpc::ClientContext context;
    v1::ListHeadsResponse response;

    ASSERT_TRUE(server->stub->ListHeads(&context, {}, &response).ok());

    EXPECT_THAT(response.heads(0).transports(), ElementsAreArray(transports));
    EXPECT_EQ(response.has_local(), server == &without_memory);
    EXPECT_FALSE(response.local().shared_memory());
  }
}

TEST(ListHeadsTest, ReportsThatAHeadIsNotReady) {
  TransportServer server;
  server.head->SetReady(false);
  grpc::ClientContext context;
  v1::ListHeadsResponse response;

  ASSERT_TRUE(server.stub->ListHeads(&context, {}, &response).ok());

  EXPECT_FALSE(response.heads(0).ready());
}

TEST(VerifyTest, ReportsTheProbe) {
  TransportServer server;
  grpc::ClientContext context;
  v1::VerifyRequest request;
  request.set_head("fake");
  request.set_rows(64);
  request.set_seed(9);
  v1::VerifyResponse response;

  ASSERT_TRUE(server.stub->Verify(&context, request, &response).ok());

  EXPECT_EQ(server.head->last_verify().rows, 64);
  EXPECT_EQ(server.head->last_verify().seed, 9U);
  EXPECT_TRUE(response.passed());
  EXPECT_EQ(response.rows(), 64U);
  EXPECT_EQ(response.logprob_difference_max(), 1e-6);
  EXPECT_EQ(response.logprob_tolerance(), 1e-4);
  EXPECT_EQ(response.entropy_difference_max(), 2e-6);
  EXPECT_EQ(response.entropy_tolerance(), 2e-4);
  EXPECT_EQ(response.logit_stddev(), 3);
  EXPECT_EQ(response.weights_version(), 3U);
  EXPECT_EQ(response.engine(), "fake/none");
  EXPECT_EQ(response.seconds(), 0.5);
}

TEST(VerifyTest, ZeroMeansTheDefaults) {
  TransportServer server;
  grpc::ClientContext context;
  v1::VerifyResponse response;

  ASSERT_TRUE(server.stub->Verify(&context, {}, &response).ok());

  EXPECT_EQ(server.head->last_verify().rows, 8);
  EXPECT_EQ(server.head->last_verify().seed, 1U);
}

TEST(VerifyTest, NeedsAHeadThatIsReady) {
  TransportServer server;
  server.head->SetReady(false);
  v1::VerifyRequest request;
  v1::VerifyResponse response;
  {
    grpc::ClientContext context;
    const grpc::Status status = server.stub->Verify(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_EQ(status.error_message(), "head \"fake\" is not ready");
  }
  request.set_head("nobody");
  grpc::ClientContext context;
  EXPECT_FALSE(server.stub->Verify(&context, request, &response).ok());
  EXPECT_EQ(server.head->last_verify().stop, nullptr);  // it was not asked
}

TEST(InfoCallsTest, AreCounted) {
  FakeClock clock;
  TransportServer server(TestServerOptions(), FakeHeadInfo(), /*with_head=*/true, clock);
  const auto count = [&](const std::string& labels) {
    const std::string text = server.metrics.Serialize();
    const std::string series = absl::StrCat("\nlogprobd_requests_total{", labels, "} ");
    return std::stod(text.substr(text.find(series) + series.size()));
  };
  v1::VerifyResponse verified;
  v1::ListHeadsResponse listed;
  grpc::ClientContext verify;
  grpc::ClientContext refused;
  grpc::ClientContext list;
  v1::VerifyRequest too_many;
  too_many.set_rows(65);

  EXPECT_TRUE(server.stub->Verify(&verify, {}, &verified).ok());
  EXPECT_FALSE(server.stub->Verify(&refused, too_many, &verified).ok());
  EXPECT_TRUE(server.stub->ListHeads(&list, {}, &listed).ok());

  EXPECT_EQ(count(R"(code="OK",head="fake",method="Verify")"), 1);
  EXPECT_EQ(count(R"(code="INVALID_ARGUMENT",head="unknown",method="Verify")"), 1);
  EXPECT_EQ(count(R"(code="OK",head="unknown",method="ListHeads")"), 1);
  EXPECT_THAT(server.metrics.Serialize(),
              HasSubstr("duration_seconds_sum{head=\"fake\",method=\"Verify\","
                        "transport=\"tcp\"} 0\n"));
}

TEST(VerifyTest, SendsTheRetryHintOfTheHead) {
  TransportServer server;
  server.head->HoldVerify();
  std::thread head([&] {
    server.head->WaitForVerify();
    server.head->FinishVerify(
        WithRetryAfter(absl::ResourceExhaustedError("another probe runs"), absl::Seconds(2)));
  });
  grpc::ClientContext context;
  v1::VerifyResponse response;

  const grpc::Status status = server.stub->Verify(&context, {}, &response);

  head.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  const auto& metadata = context.GetServerTrailingMetadata();
  const auto hint = metadata.find("grpc-retry-pushback-ms");
  ASSERT_NE(hint, metadata.end());
  EXPECT_EQ(std::string(hint->second.data(), hint->second.size()), "2000");
}

TEST(VerifyTest, RefusesAProbeOfTooManyRows) {
  TransportServer server;
  grpc::ClientContext context;
  v1::VerifyRequest request;
  request.set_rows(65);
  v1::VerifyResponse response;

  const grpc::Status status = server.stub->Verify(&context, request, &response);

  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "rows: 65, must be in [0, 64]");
}

TEST(InfoCallsTest, MalformedMessagesAreInvalidArguments) {
  TransportServer server;
  for (const char* method : {"/logprobd.v1.Scoring/ListHeads", "/logprobd.v1.Scoring/Verify"}) {
    for (const std::string& message : {std::string("\xFF\xFF\xFF"), std::string(70'000, '\x0A')}) {
      grpc::ClientContext context;
      grpc::ByteBuffer answer;
      const grpc::Status status =
          CallRaw(server.channel, method, BufferOf(message), answer, context);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
      EXPECT_THAT(status.error_message(), HasSubstr("logprobd.v1.")) << method;
    }
  }
}

/// A Verify call that runs on its own thread and blocks in the head.
class HeldVerify {
 public:
  explicit HeldVerify(TransportServer& server) : server_(server) {
    server_.head->HoldVerify();
    thread_ = std::thread([this] { status_ = server_.stub->Verify(&context_, {}, &response_); });
    server_.head->WaitForVerify();
  }
  ~HeldVerify() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  grpc::ClientContext& context() { return context_; }
  /// Blocks until the head gets the request to stop.
  void WaitForStop() const {
    const auto stop = server_.head->last_verify().stop;
    while (!stop->load()) {
      std::this_thread::yield();
    }
  }
  const grpc::Status& Join() {
    thread_.join();
    return status_;
  }

 private:
  TransportServer& server_;
  grpc::ClientContext context_;
  v1::VerifyResponse response_;
  grpc::Status status_;
  std::thread thread_;
};

// Regression: a second Verify was refused long after the client of the first had left.
TEST(VerifyTest, StopsWhenItsClientLeaves) {
  TransportServer server;
  HeldVerify verify(server);

  verify.context().TryCancel();
  verify.WaitForStop();
  server.head->FinishVerify(absl::CancelledError("stopped"));

  EXPECT_EQ(verify.Join().error_code(), grpc::StatusCode::CANCELLED);
}

TEST(VerifyTest, PassesItsDeadlineToTheHead) {
  TransportServer server;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));
  v1::VerifyResponse response;
  const absl::Time before = Clock::Steady().Now();

  ASSERT_TRUE(server.stub->Verify(&context, {}, &response).ok());

  const absl::Time deadline = server.head->last_verify().deadline;
  EXPECT_GT(deadline, before + absl::Minutes(59));
  EXPECT_LT(deadline, before + absl::Minutes(61));
}

// Regression: SIGTERM cancelled a running Verify at once, because it was not counted as work.
TEST(VerifyTest, IsWaitedForWithinTheGraceTime) {
  TransportServer server;
  HeldVerify verify(server);
  std::thread stopping([&] { server.server->Shutdown(absl::Hours(1)); });
  v1::VerifyResponse response;
  grpc::Status refused;
  do {  // until the shutdown has begun; an earlier Verify would wait forever
    grpc::ClientContext context;
    v1::ScoreResponse scores;
    refused = server.stub->Score(&context, ValidRequest(), &scores);
  } while (refused.ok());
  grpc::ClientContext context;

  const grpc::Status late = server.stub->Verify(&context, {}, &response);
  server.head->FinishVerify(absl::OkStatus());
  stopping.join();

  EXPECT_EQ(late.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(verify.Join().ok());
}

// Regression: the server waited tens of seconds for the probe after the grace time.
TEST(VerifyTest, StopsWhenTheGraceTimeIsOver) {
  TransportServer server;
  HeldVerify verify(server);

  std::thread stopping([&] { server.server->Shutdown(absl::ZeroDuration()); });
  verify.WaitForStop();
  server.head->FinishVerify(absl::CancelledError("stopped"));
  stopping.join();

  EXPECT_FALSE(verify.Join().ok());
}

TEST(VerifyTest, LogsTheDetailsThatTheClientDoesNotGet) {
  TransportServer server;
  HeldVerify verify(server);
  ::testing::internal::CaptureStderr();

  server.head->FinishVerify(absl::DataLossError("/models/x: short"));
  const grpc::Status status = verify.Join();
  const std::string log = ::testing::internal::GetCapturedStderr();

  EXPECT_THAT(status.error_message(), Not(HasSubstr("/models")));
  const std::string id = status.error_message().substr(status.error_message().find("verify-"));
  EXPECT_THAT(log, HasSubstr("/models/x: short"));
  EXPECT_THAT(log, HasSubstr("request_id=" + id));
}

}  // namespace
}  // namespace logprobd::testing
