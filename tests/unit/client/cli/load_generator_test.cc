#include "client/cli/load_generator.h"

#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_scoring_service.h"

namespace logprobd::client {
namespace {

using ::testing::HasSubstr;

class LoadGeneratorTest : public ::testing::Test {
 protected:
  LoadGeneratorTest() {
    client_ = *Client::Create({.address = server_.address(), .retries = 0});
    head_.name = "fake";
    head_.hidden_size = 8;
    head_.vocab_size = 100;
  }

  LoadResult Run(const LoadPlan& plan) {
    const Workload workload(head_, Dtype::kBf16, 4, 1);
    return RunLoad(*client_, workload, plan, [](double) {});
  }

  testing::FakeScoringServer server_;
  std::unique_ptr<Client> client_;
  Head head_;
};

TEST_F(LoadGeneratorTest, SendsAsManyRequestsAsAskedAndTheWarmUp) {
  const LoadResult result = Run({.concurrency = 3, .requests = 50, .warmup_requests = 5});

  EXPECT_EQ(result.requests, 50);
  EXPECT_EQ(result.errors, 0);
  EXPECT_EQ(result.rows, 4);
  EXPECT_GT(result.rows_per_second, 0);
  EXPECT_GT(result.latency.p50, 0);
  EXPECT_LE(result.latency.p50, result.latency.max);
  EXPECT_EQ(server_.service().requests().size(), 55U);
}

TEST_F(LoadGeneratorTest, RunsForADuration) {
  const LoadResult result = Run({.concurrency = 2, .duration = absl::Milliseconds(20)});

  EXPECT_GT(result.requests, 0);
  EXPECT_GE(result.seconds, 0.02);
}

TEST_F(LoadGeneratorTest, SendsAtARateWithoutWaitingForAnswers) {
  const LoadResult result = Run({.request_rate = 5'000, .requests = 20});

  EXPECT_EQ(result.requests, 20);
  EXPECT_EQ(result.request_rate, 5'000);
}

TEST_F(LoadGeneratorTest, CountsErrorsApart) {
  server_.service().FailNext({grpc::StatusCode::RESOURCE_EXHAUSTED, "full"});

  const LoadResult result = Run({.requests = 10});

  EXPECT_EQ(result.requests, 9);
  EXPECT_EQ(result.errors, 1);
  EXPECT_THAT(std::string(result.first_error.message()), HasSubstr("full"));
}

}  // namespace
}  // namespace logprobd::client
