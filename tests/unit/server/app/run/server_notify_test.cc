#include <gmock/gmock.h>

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "server/app/run/server.h"
#include "tests/unit/server/app/run/server_fixture.h"

// Tests of what a server tells the service manager.

namespace logprobd::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

class ServerNotifyTest : public ServerTest {
 protected:
  ServerNotifyTest() {
    parts_.notify = [this](absl::string_view message) -> absl::Status {
      const absl::MutexLock lock(&mutex_);
      if (!is_reading_) return absl::UnavailableError("a test");
      messages_.emplace_back(message);
      return absl::OkStatus();
    };
  }

  std::vector<std::string> Messages() {
    const absl::MutexLock lock(&mutex_);
    return messages_;
  }

  /// Waits until `count` messages have arrived.
  void Await(size_t count) {
    const absl::MutexLock lock(&mutex_);
    const auto arrived = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return messages_.size() >= count;
    };
    mutex_.Await(absl::Condition(&arrived));
  }

  void SetReading(bool is_reading) {
    const absl::MutexLock lock(&mutex_);
    is_reading_ = is_reading;
  }

  absl::Mutex mutex_;
  bool is_reading_ ABSL_GUARDED_BY(mutex_) = true;
  std::vector<std::string> messages_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(ServerNotifyTest, AnnouncesReadinessReloadsAndTheDrain) {
  NameTwoHeads();
  options_.grace_s = 12.5;
  parts_.read_options = [this] { return options_; };
  const std::unique_ptr<Server> server = Create();
  EXPECT_THAT(Messages(), ElementsAre());

  ASSERT_TRUE(server->Load().ok());
  std::future<Server::End> end = std::async(std::launch::async, [&] { return server->Run(); });
  server->RequestReload();
  Await(5);
  server->RequestStop();

  EXPECT_EQ(end.get(), Server::End::kStopped);
  EXPECT_THAT(
      Messages(),
      ElementsAre("STATUS=loading the weights of a (0 of 2 heads loaded)",
                  "STATUS=loading the weights of b (1 of 2 heads loaded)", "READY=1\nSTATUS=ready",
                  MatchesRegex("RELOADING=1\nMONOTONIC_USEC=[0-9]+\nSTATUS=ready"),
                  "READY=1\nSTATUS=ready",
                  "STOPPING=1\nEXTEND_TIMEOUT_USEC=42500000\n"
                  "STATUS=finishing the work in flight, at most 12.5 s"));
}

TEST_F(ServerNotifyTest, ReportsALostReplicaAndStopsWithoutAny) {
  num_replicas_ = 2;
  const std::unique_ptr<Server> server = Create();
  ASSERT_TRUE(server->Load().ok());
  std::future<Server::End> end = std::async(std::launch::async, [&] { return server->Run(); });

  engines_[0]->SetHealthy(false);
  Await(3);
  engines_[1]->SetHealthy(false);

  EXPECT_EQ(end.get(), Server::End::kEngineFailed);
  EXPECT_EQ(Messages()[2], "STATUS=ready, but 1 of 2 replicas has failed");
  EXPECT_THAT(Messages().back(), HasSubstr("STOPPING=1\n"));
}

// Regression: a manager that did not read when the server became ready was never told.
TEST_F(ServerNotifyTest, TellsAManagerThatReadsLateThatItIsReady) {
  SetReading(false);
  const std::unique_ptr<Server> server = Create();
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(server->Load().ok());
  std::future<Server::End> end = std::async(std::launch::async, [&] { return server->Run(); });
  EXPECT_THAT(Messages(), ElementsAre());

  SetReading(true);
  Await(1);
  server->RequestStop();

  EXPECT_EQ(end.get(), Server::End::kStopped);
  EXPECT_EQ(Messages().front(), "READY=1\nSTATUS=ready");
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("cannot reach the service manager reason=\"a test\""));
  EXPECT_THAT(log, HasSubstr("the service manager is reached again"));
  EXPECT_EQ(log.find("cannot reach"), log.rfind("cannot reach"));
}

TEST_F(ServerNotifyTest, IsNeverReadyIfItCannotLoad) {
  refusal_ = absl::ResourceExhaustedError("no memory");
  const std::unique_ptr<Server> server = Create();

  EXPECT_FALSE(server->Load().ok());

  EXPECT_THAT(absl::StrJoin(Messages(), "\n"), Not(HasSubstr("READY=1")));
}

}  // namespace
}  // namespace logprobd::testing
