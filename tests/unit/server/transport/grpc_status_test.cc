#include "server/transport/grpc_status.h"

#include <string>

#include "gtest/gtest.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

TEST(GrpcStatusTest, KeepsCodeAndMessage) {
  const grpc::Status status = ToGrpcStatus(absl::NotFoundError("no such head"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(status.error_message(), "no such head");
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
}

TEST(GrpcStatusTest, CutsLongMessagesAtACharacter) {
  EXPECT_EQ(ToGrpcStatus(absl::NotFoundError(std::string(5'000, 'a'))).error_message(),
            std::string(1'024, 'a'));
  const std::string text = std::string(1'023, 'a') + "\xC3\xA9";  // ends one byte too late
  EXPECT_EQ(ToGrpcStatus(absl::NotFoundError(text)).error_message(), std::string(1'023, 'a'));
}

TEST(GrpcStatusTest, RoundsTheRetryHintToAtLeastAMillisecond) {
  EXPECT_EQ(RetryAfterMs(absl::UnavailableError("x")), 0U);
  EXPECT_EQ(RetryAfterMs(WithRetryAfter(absl::UnavailableError("x"), absl::ZeroDuration())), 1U);
  EXPECT_EQ(RetryAfterMs(WithRetryAfter(absl::UnavailableError("x"), absl::Milliseconds(250))),
            250U);
  EXPECT_EQ(RetryAfterMs(WithRetryAfter(absl::UnavailableError("x"), absl::Hours(100'000))),
            2'147'483'647U);
}

TEST(GrpcStatusTest, KeepsAnEnginesDetailsInTheLog) {
  const absl::Status no_memory = absl::ResourceExhaustedError("CUDA error 2 at cuda_head.cc:25");

  EXPECT_EQ(ClientMessage(WithDetailsForLog(no_memory)),
            "the engine has no memory for the batch; the server's log has the details under this "
            "request_id");
  EXPECT_EQ(ClientMessage(absl::InternalError("/models/x"), "verify-7"),
            "internal error; the server's log has the details under verify-7");
  EXPECT_EQ(ClientMessage(absl::DataLossError("/models/x"), "verify-7"),
            "the server failed; the server's log has the details under verify-7");
  EXPECT_EQ(ClientMessage(absl::ResourceExhaustedError("queue rows")), "queue rows");
}

TEST(GrpcStatusTest, SendsValidUtf8WhateverTheMessageHolds) {
  EXPECT_EQ(ClientMessage(absl::NotFoundError("no \"\xC3\" here")), "no \"?\" here");
}

}  // namespace
}  // namespace logprobd
