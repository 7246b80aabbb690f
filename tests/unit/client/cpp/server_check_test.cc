#include "client/cpp/server_check.h"

#include <grpcpp/support/slice.h>

#include <optional>
#include <string>
#include <utility>

#include "client/cpp/policy.h"
#include "client/cpp/server_messages.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "logprobd/v1/scoring.pb.h"
#include "tests/unit/client/cpp/fake_transport.h"

namespace logprobd::client {
namespace {

using ::testing::Each;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

grpc::ByteBuffer Bytes(const std::string& text) {
  const grpc::Slice slice(text);
  return {&slice, 1};
}

grpc::ByteBuffer HeadsNamed(const std::string& name) {
  v1::ListHeadsResponse response;
  response.add_heads()->set_name(name);
  return Bytes(response.SerializeAsString());
}

class ServerCheckTest : public ::testing::Test {
 protected:
  void Start(int32_t connections = 1) {
    StartServerCheck(
        server_, "a:1", connections,
        [this](const absl::StatusOr<ServerInfo>& info, const grpc::ByteBuffer& listed) {
          info_ = info;
          listed_bytes_ = listed.Valid() ? listed.Length() : 0;
        });
  }

  /// Returns why a server with these answers cannot be used, or "nothing".
  std::string WhyNot(RpcReply health, std::optional<RpcReply> heads = std::nullopt) {
    info_.reset();
    Start();
    server_.Reply(std::move(health));
    if (heads.has_value()) server_.Reply(*std::move(heads));
    if (!info_.has_value() || info_->ok()) return "nothing";
    EXPECT_EQ(info_->status().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(listed_bytes_, 0U);
    return std::string(info_->status().message());
  }

  FakeTransport server_;
  std::optional<absl::StatusOr<ServerInfo>> info_;
  size_t listed_bytes_ = 0;
};

TEST_F(ServerCheckTest, AsksOverEveryConnectionForHealthAndThenForHeads) {
  Start(/*connections=*/3);

  ASSERT_THAT(server_.calls, SizeIs(3));
  EXPECT_THAT(server_.calls, Each(Field(&FakeTransport::PendingCall::method, kHealthMethod)));
  EXPECT_THAT(server_.calls, Each(Field(&FakeTransport::PendingCall::deadline,
                                        server_.now + policy::kCheckTimeout)));
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(info_.has_value());
    server_.Reply({.body = EncodeServing()});
  }
  ASSERT_THAT(server_.calls, SizeIs(1));
  EXPECT_EQ(server_.calls[0].method, kListHeadsMethod);
  server_.Reply({.body = HeadsNamed("h")});

  ASSERT_TRUE(info_.has_value());
  ASSERT_TRUE(info_->ok()) << info_->status();
  EXPECT_EQ((*info_)->heads.at(0).name, "h");
  EXPECT_GT(listed_bytes_, 0U);
}

TEST_F(ServerCheckTest, RejectsAServerWhenOneConnectionFails) {
  Start(/*connections=*/2);

  server_.Reply({.status = absl::UnavailableError("connection refused")});
  EXPECT_FALSE(info_.has_value());
  server_.Reply({.body = EncodeServing()});

  EXPECT_THAT(server_.calls, IsEmpty());
  ASSERT_TRUE(info_.has_value());
  EXPECT_EQ(info_->status(), absl::UnavailableError("UNAVAILABLE: connection refused"));
}

TEST_F(ServerCheckTest, JudgesAServerWithoutAHealthServiceByItsHeads) {
  Start();

  server_.Reply({.status = absl::UnimplementedError("no such method")});
  server_.Reply({.body = HeadsNamed("h")});

  ASSERT_TRUE(info_.has_value());
  EXPECT_TRUE(info_->ok()) << info_->status();
}

TEST_F(ServerCheckTest, SaysWhyAServerCannotBeUsed) {
  const RpcReply serving = {.body = EncodeServing()};

  EXPECT_EQ(WhyNot({.body = Bytes("\x08\x02")}),
            "health says NOT_SERVING: the server is starting or stopping");
  EXPECT_EQ(WhyNot({.status = absl::DeadlineExceededError("too late")}),
            "DEADLINE_EXCEEDED: too late");
  EXPECT_THAT(WhyNot({.body = Bytes("no message")}), HasSubstr("HealthCheckResponse"));
  EXPECT_EQ(WhyNot(serving, RpcReply{.status = absl::InternalError("oops")}), "INTERNAL: oops");
  EXPECT_THAT(WhyNot(serving, RpcReply{.body = Bytes("no message")}),
              HasSubstr("ListHeadsResponse"));
  EXPECT_EQ(WhyNot(serving, RpcReply{.body = Bytes("")}), "it holds no head");
}

}  // namespace
}  // namespace logprobd::client
