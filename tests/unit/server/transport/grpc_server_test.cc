#include "server/transport/grpc_server.h"

#include <sys/stat.h>

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_stream.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kHealthCheck[] = "/grpc.health.v1.Health/Check";
constexpr char kReflection[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

/// Returns the status of grpc.health.v1: 1 for SERVING, 2 for NOT_SERVING, 0 when the check failed.
int HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  std::string request;
  if (!service.empty()) {
    request = absl::StrCat("\x0A", std::string(1, static_cast<char>(service.size())), service);
  }
  grpc::ClientContext context;
  grpc::ByteBuffer answer;
  if (!CallRaw(channel, kHealthCheck, BufferOf(request), answer, context).ok()) {
    return 0;
  }
  const std::string bytes = StringOf(answer);  // field 1, a number
  return bytes.size() == 2 ? bytes[1] : 0;
}

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) {
  return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
}

std::chrono::system_clock::time_point WaitLimit() {
  return std::chrono::system_clock::now() + std::chrono::seconds(20);
}

absl::Status CreateStatus(const GrpcServer::Options& options) {
  FakeRegistry registry;
  Metrics metrics({.heads = {"fake"}});
  return GrpcServer::Create(options, registry, metrics, Clock::Steady()).status();
}

TEST(GrpcServerTest, HealthFollowsSetServingOnEveryListener) {
  GrpcServer::Options options = TestServerOptions();
  options.admin = TestAdminAddress();
  TransportServer server(options);
  const auto admin = ChannelTo(server.server->admin_address());
  server.server->SetServing(false);
  for (const auto& channel : {server.channel, admin}) {
    EXPECT_EQ(HealthOf(channel, ""), 2);
    EXPECT_EQ(HealthOf(channel, "logprobd.v1.Scoring"), 2);
  }

  server.server->SetServing(true);

  for (const auto& channel : {server.channel, admin}) {
    EXPECT_EQ(HealthOf(channel, ""), 1);
    EXPECT_EQ(HealthOf(channel, "logprobd.v1.Scoring"), 1);
    EXPECT_EQ(HealthOf(channel, "another.Service"), 0);
  }
}

TEST(GrpcServerTest, WatchersOfTheHealthSeeItChange) {
  TransportServer server;
  class Watcher final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    void OnReadDone(bool ok) override {
      absl::MutexLock lock(&mutex);
      states.push_back(ok ? StringOf(message).at(1) : -1);
      if (ok) {
        StartRead(&message);
      }
    }
    void OnDone(const grpc::Status& /*status*/) override { done.Notify(); }
    void AwaitState(char state) {
      absl::MutexLock lock(&mutex);
      const auto has_come = [this, state] { return !states.empty() && states.back() == state; };
      mutex.Await(absl::Condition(&has_come));
    }
    grpc::ByteBuffer message;
    absl::Mutex mutex;
    std::vector<char> states;
    absl::Notification done;
  } watcher;
  grpc::GenericStub stub(server.channel);
  grpc::ClientContext context;
  grpc::ByteBuffer request = BufferOf("");
  stub.PrepareBidiStreamingCall(&context, "/grpc.health.v1.Health/Watch", grpc::StubOptions(),
                                &watcher);
  watcher.StartWriteLast(&request, grpc::WriteOptions());
  watcher.StartRead(&watcher.message);
  watcher.StartCall();
  watcher.AwaitState(1);

  server.server->SetServing(false);
  watcher.AwaitState(2);

  // A watcher never ends by itself, and Shutdown does not wait for it.
  server.server->Shutdown(absl::Hours(1));
  watcher.done.WaitForNotification();
}

TEST(GrpcServerTest, ServesTheUnixSocketToo) {
  GrpcServer::Options options = TestServerOptions();
  const TempFolder folder;
  options.unix_socket = folder.path("socket");
  TransportServer server(options);
  auto stub = v1::Scoring::NewStub(ChannelTo("unix:" + options.unix_socket));
  grpc::ClientContext context;
  v1::ScoreResponse response;

  ::testing::internal::CaptureStderr();
  const grpc::Status status = stub->Score(&context, ValidRequest(), &response);

  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(server.head->last_request().client_id, "unix");
  // Only connections to --admin have lines.
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("audit")));
  EXPECT_EQ(server.server->unix_socket_path(), options.unix_socket);
  EXPECT_EQ(server.server->admin_address(), "");
}

// Regression: its mode was that of the umask.
TEST(GrpcServerTest, TheUnixSocketIsForTheOwnUserOnlyAndIsRemoved) {
  GrpcServer::Options options = TestServerOptions();
  const TempFolder folder;
  options.unix_socket = folder.path("socket");
  struct stat file = {};
  {
    const mode_t before = umask(0);
    const TransportServer server(options);
    umask(before);
    ASSERT_EQ(lstat(options.unix_socket.c_str(), &file), 0);
    EXPECT_EQ(file.st_mode & ~static_cast<mode_t>(S_IFMT), static_cast<mode_t>(S_IRUSR | S_IWUSR));
  }
  EXPECT_NE(lstat(options.unix_socket.c_str(), &file), 0);
}

TEST(GrpcServerTest, ReplacesALeftoverSocketButNotOneInUse) {
  GrpcServer::Options options = TestServerOptions();
  const TempFolder folder;
  options.unix_socket = folder.path("socket");
  TransportServer server(options);

  const absl::Status in_use = CreateStatus(options);

  EXPECT_EQ(in_use.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(in_use.message()), HasSubstr("another server is listening"));
  struct stat file = {};
  EXPECT_EQ(stat(options.unix_socket.c_str(), &file), 0);
  server.server->Shutdown(absl::ZeroDuration());
  EXPECT_TRUE(CreateStatus(options).ok());
}

TEST(GrpcServerTest, ServesWithoutAnOptionalUnixSocket) {
  GrpcServer::Options options = TestServerOptions();
  const TempFolder folder;
  options.unix_socket = folder.path("no_such_folder/socket");
  EXPECT_EQ(CreateStatus(options).code(), absl::StatusCode::kUnavailable);
  options.unix_socket_is_optional = true;

  TransportServer server(options);

  EXPECT_EQ(server.server->unix_socket_path(), "");
  grpc::ClientContext context;
  v1::ScoreResponse response;
  EXPECT_TRUE(server.stub->Score(&context, ValidRequest(), &response).ok());
}

TEST(GrpcServerTest, ReportsThatAPortIsInUse) {
  TransportServer server;
  GrpcServer::Options options = TestServerOptions();
  options.listen = server.address();

  const absl::Status status = CreateStatus(options);

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(),
            absl::StrCat("--listen: cannot listen on ", server.address(),
                         ": the port is in use; stop the other server or choose another port"));
}

TEST(GrpcServerTest, ReportsThatTheAdminPortIsInUse) {
  TransportServer server;
  GrpcServer::Options options = TestServerOptions();
  options.admin = server.address();
  options.insecure = true;
  EXPECT_THAT(std::string(CreateStatus(options).message()),
              HasSubstr("--admin: cannot listen on "));
}

TEST(GrpcServerTest, RefusesAPublicAddressUnlessInsecure) {
  GrpcServer::Options options = TestServerOptions();
  options.listen = "0.0.0.0:0";
  const absl::Status status = CreateStatus(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--insecure"));

  options.insecure = true;
  EXPECT_TRUE(CreateStatus(options).ok());

  options = TestServerOptions();
  options.admin = "[::]:0";
  EXPECT_EQ(CreateStatus(options).code(), absl::StatusCode::kFailedPrecondition);
}

// Regression: every user of the host could replace the weights.
TEST(GrpcServerTest, RefusesAdminOnLoopbackUnlessInsecure) {
  GrpcServer::Options options = TestServerOptions();
  options.admin = "127.0.0.1:0";
  const absl::Status status = CreateStatus(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("every user of this host"));

  options.insecure = true;
  EXPECT_TRUE(CreateStatus(options).ok());
}

TEST(GrpcServerTest, TheAdminSocketIsForTheOwnUserAndForOneServer) {
  GrpcServer::Options options = TestServerOptions();
  options.admin = TestAdminAddress();
  const std::string path = options.admin.substr(std::string("unix:").size());
  struct stat file = {};
  {
    TransportServer server(options);
    ASSERT_EQ(lstat(path.c_str(), &file), 0);
    EXPECT_EQ(file.st_mode & ~static_cast<mode_t>(S_IFMT), static_cast<mode_t>(S_IRUSR | S_IWUSR));
    const absl::Status second = CreateStatus(options);
    EXPECT_EQ(second.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(second.message()),
                HasSubstr(absl::StrCat("--admin: another server is listening on ", path)));
    EXPECT_EQ(HealthOf(ChannelTo(options.admin), ""), 1);
  }
  EXPECT_NE(lstat(path.c_str(), &file), 0);
  EXPECT_NE(lstat(absl::StrCat(path, ".lock").c_str(), &file), 0);
}

TEST(GrpcServerTest, NamesABadOption) {
  GrpcServer::Options options = TestServerOptions();
  options.listen = "nonsense";
  EXPECT_EQ(CreateStatus(options).code(), absl::StatusCode::kInvalidArgument);

  options = TestServerOptions();
  options.message_bytes_max = int64_t{1} << 40;
  EXPECT_THAT(std::string(CreateStatus(options).message()), HasSubstr("message_bytes_max"));

  options = TestServerOptions();
  options.receive_bytes_max = options.message_bytes_max;
  EXPECT_THAT(std::string(CreateStatus(options).message()), HasSubstr("receive_bytes_max"));

  options = TestServerOptions();
  options.streams_max = 0;
  EXPECT_THAT(std::string(CreateStatus(options).message()), HasSubstr("streams_max"));
}

TEST(GrpcServerTest, ChecksItsLimitsOnBothSides) {
  struct Limit {
    std::string name;
    std::vector<std::function<void(GrpcServer::Options&)>> good;
    std::vector<std::function<void(GrpcServer::Options&)>> bad;
  };
  using Options = GrpcServer::Options;
  constexpr int64_t kMessageMax = std::numeric_limits<int32_t>::max();
  const Limit limits[] = {
      {"message_bytes_max",
       {[](Options& o) { o.message_bytes_max = 1; },
        [](Options& o) {
          o.message_bytes_max = kMessageMax;
          o.receive_bytes_max = 2 * kMessageMax;
        }},
       {[](Options& o) { o.message_bytes_max = 0; },
        [](Options& o) {
          o.message_bytes_max = kMessageMax + 1;
          o.receive_bytes_max = 4 * kMessageMax;
        }}},
      {"receive_bytes_max",
       {[](Options& o) { o.receive_bytes_max = 2 * o.message_bytes_max; }},
       {[](Options& o) { o.receive_bytes_max = 2 * o.message_bytes_max - 1; }}},
      {"streams_max",
       {[](Options& o) { o.streams_max = 1; }},
       {[](Options& o) { o.streams_max = 0; }, [](Options& o) { o.streams_max = -1; }}},
      {"answers.bytes_max", {[](Options& o) { o.answers.bytes_max = 1; }}, {[](Options& o) {
         o.answers.bytes_max = 0;
       }}},
      {"answers.client_share_max",
       {[](Options& o) { o.answers.client_share_max = 1e-9; },
        [](Options& o) { o.answers.client_share_max = 1; }},
       {[](Options& o) { o.answers.client_share_max = 0; },
        [](Options& o) { o.answers.client_share_max = 1.001; },
        [](Options& o) {
          o.answers.client_share_max = std::numeric_limits<double>::quiet_NaN();
        }}}};
  const auto status_with = [](const std::function<void(Options&)>& change) {
    Options options = TestServerOptions();
    change(options);
    return CreateStatus(options);
  };

  for (const Limit& limit : limits) {
    for (const auto& change : limit.good) {
      EXPECT_TRUE(status_with(change).ok()) << limit.name << " " << status_with(change);
    }
    for (const auto& change : limit.bad) {
      const absl::Status status = status_with(change);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), StartsWith(limit.name + ": "));
    }
  }
}

TEST(GrpcServerTest, AConnectionHasOnlyItsNumberOfCallsAtOnce) {
  GrpcServer::Options options = TestServerOptions();
  options.streams_max = 1;
  TransportServer server(options);
  server.head->Hold();
  v1::ScoreResponse first_response;
  grpc::Status first_status;
  std::thread first([&] {
    grpc::ClientContext context;
    first_status = server.stub->Score(&context, ValidRequest(), &first_response);
  });
  server.head->WaitForSubmitted(1);

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  v1::ScoreResponse response;
  const grpc::Status second = server.stub->Score(&context, ValidRequest(), &response);

  EXPECT_EQ(second.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(server.head->num_submitted(), 1);
  server.head->Release();
  first.join();
  EXPECT_TRUE(first_status.ok()) << first_status.error_message();
}

// Otherwise a client that leaves because of the age would see the end of its watch before.
TEST(GrpcServerTest, AWatchOfTheHealthOutlivesTheAgeOfItsConnectionByAQuarter) {
  FakeClock clock;
  GrpcServer::Options options = TestServerOptions();
  options.connection_age_ms_max = 40 * 60'000;
  TransportServer server(options, FakeHeadInfo(), /*with_head=*/true, clock);
  grpc::Status status;
  std::thread watch([&] {
    grpc::ClientContext context;
    grpc::ByteBuffer answer;
    status = CallRaw(server.channel, "/grpc.health.v1.Health/Watch", BufferOf(""), answer, context);
  });

  clock.WaitForWaiter(clock.Now() + absl::Minutes(50));
  clock.Advance(absl::Minutes(50));

  watch.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST(GrpcServerTest, NewLimitsOfAnswersHoldAtOnce) {
  TransportServer server;
  const auto score = [&] {
    grpc::ClientContext context;
    v1::ScoreResponse response;
    return server.stub->Score(&context, ValidRequest(), &response).error_code();
  };
  // An answer has 16 bytes. Those of one that the client has may count for a moment longer.
  server.server->SetAnswerLimits(/*bytes_max=*/30, /*client_share=*/0.5);
  EXPECT_EQ(score(), grpc::StatusCode::INVALID_ARGUMENT);
  server.server->SetAnswerLimits(/*bytes_max=*/32, /*client_share=*/0.5);
  EXPECT_EQ(score(), grpc::StatusCode::OK);
  server.server->SetAnswerLimits(/*bytes_max=*/30, /*client_share=*/0.5);
  EXPECT_EQ(score(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST(GrpcServerTest, OffersReflectionOnlyByFlag) {
  for (const bool reflection : {false, true}) {
    GrpcServer::Options options = TestServerOptions();
    options.reflection = reflection;
    TransportServer server(options);
    grpc::ClientContext context;
    grpc::ByteBuffer answer;
    const std::string list_services("\x3A\x00", 2);  // list_services = 7, ""
    const grpc::Status status =
        CallRaw(server.channel, kReflection, BufferOf(list_services), answer, context);
    EXPECT_EQ(status.ok(), reflection) << status.error_message();
    if (reflection) {
      EXPECT_THAT(StringOf(answer), HasSubstr("logprobd.v1.Scoring"));
    } else {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    }
  }
}

TEST(GrpcServerTest, ShutdownLetsWorkFinishAndRefusesNew) {
  TransportServer server;
  server.head->Hold();
  grpc::ClientContext context;
  v1::ScoreRequest request = ValidRequest();
  v1::ScoreResponse response;
  grpc::Status status;
  absl::Notification done;
  server.stub->async()->Score(&context, &request, &response, [&](grpc::Status s) {
    status = std::move(s);
    done.Notify();
  });
  server.head->WaitForSubmitted(1);

  std::thread shutdown([&] { server.server->Shutdown(absl::Hours(1)); });
  grpc::Status refused;
  do {
    grpc::ClientContext new_context;
    new_context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
    v1::ScoreRequest bad;  // answered at once in any case
    refused = server.stub->Score(&new_context, bad, &response);
  } while (refused.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(HealthOf(server.channel, ""), 2);
  server.head->Release();
  shutdown.join();
  done.WaitForNotification();

  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(GrpcServerTest, ShutdownCancelsWorkThatOutlastsTheGrace) {
  TransportServer server;
  server.head->Hold();
  grpc::ClientContext context;
  v1::ScoreRequest request = ValidRequest();
  v1::ScoreResponse response;
  absl::Notification done;
  grpc::Status status;
  server.stub->async()->Score(&context, &request, &response, [&](grpc::Status s) {
    status = std::move(s);
    done.Notify();
  });
  server.head->WaitForSubmitted(1);
  TestStream idle(server.channel);

  server.server->Shutdown(absl::ZeroDuration());

  done.WaitForNotification();
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(server.head->num_waiting(), 0);
}

TEST(GrpcServerTest, ClosesAnIdleConnection) {
  GrpcServer::Options options = TestServerOptions();
  options.connection_idle_ms_max = 200;
  const TransportServer server(options);

  EXPECT_TRUE(server.channel->WaitForConnected(WaitLimit()));
  EXPECT_TRUE(server.channel->WaitForStateChange(GRPC_CHANNEL_READY, WaitLimit()));
}

TEST(GrpcServerTest, ClosesAnOldConnectionWhenItsCallsHaveEnded) {
  GrpcServer::Options options = TestServerOptions();
  options.connection_age_ms_max = 200;
  TransportServer server(options);
  TestStream stream(server.channel);

  EXPECT_TRUE(server.channel->WaitForConnected(WaitLimit()));
  // The server asks for no more calls, but the stream goes on.
  EXPECT_TRUE(server.channel->WaitForStateChange(GRPC_CHANNEL_READY, WaitLimit()));
  stream.Send(ValidRequest());
  EXPECT_EQ(stream.Read().status_code(), 0U);
  stream.CloseWrites();
  EXPECT_TRUE(stream.Finish().ok());
}

}  // namespace
}  // namespace logprobd::testing
