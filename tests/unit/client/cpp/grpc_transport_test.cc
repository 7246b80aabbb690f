// Tests what GrpcTransport does beyond its interface, with a server on the loopback interface.

#include "client/cpp/grpc_transport.h"

#include <utility>

#include "absl/synchronization/notification.h"
#include "client/cpp/server_messages.h"
#include "gtest/gtest.h"
#include "tests/support/fake_scoring_service.h"

namespace logprobd::client {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

// Regression: a thread of gRPC could release the last reference to a channel. It then waited for
// itself, and gRPC aborted in grpc_cq_internal_unref.
TEST(GrpcTransportTest, AnswersTheCallInFlightToAServerThatLeaves) {
  testing::FakeScoringServer server;
  server.service().Hold();
  const grpc::Slice no_fields;
  GrpcTransport transport({.channels = 1});
  const auto call = [&](absl::Notification& is_over) {
    transport.Call({.method = kScoreMethod,
                    .body = grpc::ByteBuffer(&no_fields, 1),
                    .deadline = transport.Now() + kPatience,
                    .scope = transport.NewScope(),
                    .server = server.address()},
                   [&](const RpcReply& reply) {
                     EXPECT_NE(reply.status.code(), absl::StatusCode::kUnavailable) << reply.status;
                     EXPECT_NE(reply.status.code(), absl::StatusCode::kCancelled) << reply.status;
                     is_over.Notify();
                   });
  };
  absl::Notification is_over, is_over_after_return;

  call(is_over);
  server.service().WaitForHeld(1);
  transport.KeepServers({});
  server.service().Release();
  ASSERT_TRUE(is_over.WaitForNotificationWithTimeout(kPatience));
  transport.KeepServers({});

  call(is_over_after_return);
  EXPECT_TRUE(is_over_after_return.WaitForNotificationWithTimeout(kPatience));
}

}  // namespace
}  // namespace logprobd::client
