// Tests what GrpcTransport does beyond its interface, with a server on the loopback interface.

#include "client/cpp/grpc_transport.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/server_messages.h"
#include "gtest/gtest.h"
#include "tests/support/fake_scoring_service.h"
#include "tests/support/loopback_listener.h"

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

/// A listener that takes one connection, and speaks as much of HTTP/2 as lets gRPC send a call.
class SilentServer {
 public:
  SilentServer() = default;
  ~SilentServer() { close(connection_); }
  SilentServer(const SilentServer&) = delete;
  SilentServer& operator=(const SilentServer&) = delete;

  const std::string& address() const { return listener_.address(); }

  void Accept() {
    connection_ = listener_.Accept();
    constexpr char kEmptySettings[9] = {0, 0, 0, 4};
    EXPECT_EQ(send(connection_, kEmptySettings, sizeof(kEmptySettings), MSG_NOSIGNAL), 9);
  }

  /// Returns whether the client closes the connection in time.
  bool IsClosed(absl::Duration patience) {
    pollfd waited = {.fd = connection_, .events = POLLIN, .revents = 0};
    char bytes[4096];
    while (poll(&waited, 1, static_cast<int>(absl::ToInt64Milliseconds(patience))) == 1) {
      if (recv(connection_, bytes, sizeof(bytes), 0) <= 0) return true;
    }
    return false;
  }

 private:
  const testing::LoopbackListener listener_;
  int connection_ = -1;
};

TEST(GrpcTransportTest, ClosesTheConnectionsToServersThatLeaveAndNoOthers) {
  std::vector<std::unique_ptr<SilentServer>> servers;
  for (int i = 0; i < 3; ++i) servers.push_back(std::make_unique<SilentServer>());
  // A server that stays is before those that leave.
  std::sort(servers.begin(), servers.end(),
            [](const auto& a, const auto& b) { return a->address() < b->address(); });
  const grpc::Slice no_fields;
  GrpcTransport transport({.channels = 1});
  absl::Notification are_over[3];

  for (int i = 0; i < 3; ++i) {
    transport.Call({.method = kScoreMethod,
                    .body = grpc::ByteBuffer(&no_fields, 1),
                    .deadline = transport.Now() + absl::Seconds(1),
                    .scope = transport.NewScope(),
                    .server = servers[i]->address()},
                   [&are_over, i](const RpcReply&) { are_over[i].Notify(); });
    servers[i]->Accept();
  }
  for (absl::Notification& is_over : are_over) {
    ASSERT_TRUE(is_over.WaitForNotificationWithTimeout(kPatience));
  }
  // A call may count as in flight for a moment after its answer; its channel is closed later.
  const auto is_closed = [&](SilentServer& server) {
    for (const absl::Time end = absl::Now() + kPatience; absl::Now() < end;) {
      transport.KeepServers({servers[0]->address()});
      if (server.IsClosed(absl::Milliseconds(20))) return true;
    }
    return false;
  };

  EXPECT_TRUE(is_closed(*servers[1]));
  EXPECT_TRUE(is_closed(*servers[2]));
  EXPECT_FALSE(servers[0]->IsClosed(absl::Milliseconds(50)));
}

}  // namespace
}  // namespace logprobd::client
