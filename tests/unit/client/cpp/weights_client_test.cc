#include "client/cpp/weights_client.h"

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_scoring_service.h"
#include "tests/support/fake_weights_service.h"
#include "tests/support/temp_folder.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::LoadWeightsProgress Progress(const std::string& phase, uint64_t done, uint64_t total) {
  v1::LoadWeightsProgress progress;
  progress.set_phase(phase);
  progress.set_bytes_done(done);
  progress.set_bytes_total(total);
  return progress;
}

v1::LoadWeightsProgress Done(uint64_t version) {
  v1::LoadWeightsProgress progress = Progress("done", 8, 8);
  progress.mutable_done()->set_version(version);
  progress.mutable_done()->set_sha256("abc");
  progress.mutable_done()->set_source("/m/2");
  progress.mutable_done()->set_loaded_unix_seconds(5);
  progress.mutable_done()->set_weight_bytes(8);
  return progress;
}

class WeightsClientTest : public ::testing::Test {
 protected:
  std::unique_ptr<WeightsClient> Connect(WeightsClient::Options options = {}) {
    options.address = server_.address();
    return *WeightsClient::Create(options);
  }

  testing::FakeWeightsServer server_;
};

TEST_F(WeightsClientTest, LoadReportsItsProgressAndReturnsTheVersion) {
  server_.service().progress() = {Progress("verifying", 4, 8), Done(2)};
  std::vector<std::string> phases;

  const auto version = Connect()->Load({.path = "/m/2"}, [&](const LoadProgress& progress) {
    phases.push_back(progress.phase);
    EXPECT_EQ(progress.bytes_done, 4);
    EXPECT_EQ(progress.bytes_total, 8);
    return true;
  });

  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(version->version, 2U);
  EXPECT_EQ(version->sha256, "abc");
  EXPECT_EQ(version->source, "/m/2");
  EXPECT_EQ(version->loaded_unix_seconds, 5);
  EXPECT_EQ(version->weight_bytes, 8);
  EXPECT_THAT(phases, ElementsAre("verifying"));
}

TEST_F(WeightsClientTest, LoadIsCancelledByItsProgress) {
  server_.service().progress() = {Progress("loading", 1, 8)};
  server_.service().HoldLoads();

  const auto version = Connect()->Load({.path = "/m/2"}, [](const LoadProgress&) { return false; });

  EXPECT_EQ(version.status().code(), absl::StatusCode::kCancelled);
  server_.service().WaitForCancelled();
}

TEST_F(WeightsClientTest, LoadHasALimitOfItsOwn) {
  server_.service().HoldLoads();

  const auto version =
      Connect({.load_timeout = absl::Milliseconds(50)})->Load({.path = "/m/2"}, {});

  EXPECT_EQ(version.status().code(), absl::StatusCode::kDeadlineExceeded);
  server_.service().WaitForCancelled();
}

TEST_F(WeightsClientTest, ALoadThatEndsWithoutItsVersionIsAnError) {
  server_.service().progress() = {Progress("loading", 1, 8)};

  EXPECT_EQ(Connect()->Load({.path = "/m/2"}, {}).status().code(), absl::StatusCode::kInternal);
}

TEST_F(WeightsClientTest, ReturnsTheVersionsThatAHeadHas) {
  server_.service().state().set_head("policy");
  server_.service().state().mutable_live()->set_version(3);
  server_.service().state().mutable_previous()->set_version(2);
  server_.service().state().mutable_pushed()->set_version(4);
  server_.service().state().mutable_pushed()->set_rows(10);
  server_.service().state().mutable_pushed()->set_vocab_rows(1'000);
  server_.service().state().set_highest_version(9);

  const auto head = Connect()->Commit("policy", 3);

  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(head->head, "policy");
  EXPECT_EQ(head->live->version, 3U);
  EXPECT_FALSE(head->staged.has_value());
  EXPECT_EQ(head->previous->version, 2U);
  EXPECT_EQ(head->pushed->version, 4U);
  EXPECT_EQ(head->pushed->rows, 10);
  EXPECT_EQ(head->pushed->vocab_rows, 1'000);
  EXPECT_EQ(head->highest_version, 9U);
}

TEST_F(WeightsClientTest, PassesOnTheServersErrors) {
  server_.service().FailWith({grpc::StatusCode::FAILED_PRECONDITION, "no version is staged"});
  const std::unique_ptr<WeightsClient> client = Connect();

  for (const absl::Status& status :
       {client->Commit("", 0).status(), client->Rollback("").status(),
        client->Discard("", true, true).status(), client->List().status(),
        client->Load({.path = "/m/2"}, {}).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(status.message(), "no version is staged");
  }
}

// Regression: a folder that the server cannot load was reported as a wrong address.
TEST_F(WeightsClientTest, PassesOnThatAFolderCannotBeLoaded) {
  server_.service().FailWith({grpc::StatusCode::UNIMPLEMENTED, "quantised head"});

  const absl::Status status = Connect()->Load({.path = "/m/2"}, {}).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(status.message(), "quantised head");
}

TEST_F(WeightsClientTest, SaysThatAnotherListenerIsNotTheAdmins) {
  const testing::FakeScoringServer data;

  const absl::Status status =
      (*WeightsClient::Create({.address = data.address()}))->List().status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("use the address of logprobd --admin"));
}

TEST_F(WeightsClientTest, SaysWhereNobodyAnswered) {
  const absl::Status status = (*WeightsClient::Create({.address = "127.0.0.1:1"}))->List().status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("check that logprobd runs with --admin 127.0.0.1:1"));
}

TEST_F(WeightsClientTest, LooksForTheSocketOfItsOwnUserByDefault) {
  const testing::TempFolder folder;
  const std::string path =
      folder.Write("logprobd-8470.sock.admin", "no socket, so that the error names it");
  const char* const before = std::getenv("XDG_RUNTIME_DIR");
  const std::string saved = before == nullptr ? "" : before;
  setenv("XDG_RUNTIME_DIR", folder.path().c_str(), 1);

  const absl::Status status = (*WeightsClient::Create({}))->List().status();

  before == nullptr ? unsetenv("XDG_RUNTIME_DIR") : setenv("XDG_RUNTIME_DIR", saved.c_str(), 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(),
              HasSubstr(absl::StrCat("check that logprobd runs with --admin unix:", path)));
}

TEST_F(WeightsClientTest, RefusesOptionsThatCannotWork) {
  EXPECT_FALSE(WeightsClient::Create({.address = ""}).ok());
  EXPECT_FALSE(WeightsClient::Create({.timeout = absl::ZeroDuration()}).ok());
  EXPECT_FALSE(WeightsClient::Create({.load_timeout = absl::ZeroDuration()}).ok());

  const absl::Status no_file =
      WeightsClient::Create({.tls = Tls{.ca = "/no/such/ca.pem"}}).status();
  EXPECT_THAT(no_file.message(), HasSubstr("/no/such/ca.pem"));
}

}  // namespace
}  // namespace logprobd::client
