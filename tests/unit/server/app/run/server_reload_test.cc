#include <gmock/gmock.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "server/app/run/server.h"
#include "tests/unit/server/app/run/server_fixture.h"

// Tests of a server that reads its settings again on SIGHUP.

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;

using ServerReloadTest = ServerTest;

TEST_F(ServerReloadTest, AppliesReloadedLimitsToAllHeads) {
  NameTwoHeads();
  ServerOptions next = options_;
  next.queue_bytes = 1'000'000;
  next.request_rows = 7;
  next.queue_rows = 1'000;
  next.batch_rows = 32;
  absl::Notification is_read;
  parts_.read_options = [&]() -> absl::StatusOr<ServerOptions> {
    is_read.Notify();
    return next;
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
  // Regression: the page showed the limit that was set at the start.
  EXPECT_THAT(HttpGet(server->http_port(), "/?format=html"), HasSubstr("at most 1,000 rows"));
  server->RequestStop();

  EXPECT_EQ(end.get(), Server::End::kStopped);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("info SIGHUP applied=\"request-rows, queue-rows, queue-bytes\"\n"));
  EXPECT_THAT(log, HasSubstr("warning SIGHUP: changed settings need a restart settings="
                             "batch-rows\n"));
}

TEST_F(ServerReloadTest, KeepsItsSettingsWhenTheNewOnesAreWrong) {
  std::atomic<int> num_read = 0;
  parts_.read_options = [&]() -> absl::StatusOr<ServerOptions> {
    const int number = num_read++;
    if (number == 0) {
      return absl::InvalidArgumentError("file c.toml: key x is unknown");
    }
    ServerOptions next = options_;
    next.queue_bytes = number == 1 ? int64_t{2} << 30 : next.queue_bytes;
    return next;
  };
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  ::testing::internal::CaptureStderr();

  std::future<Server::End> end = std::async(std::launch::async, [&] { return server->Run(); });
  for (int number = 1; number <= 3; ++number) {  // a reload is done when the next one is read
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

}  // namespace
}  // namespace logprobd::testing
