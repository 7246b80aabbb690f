// Tests what GrpcTransport does beyond its interface, with a server on the loopback interface.

#include "client/cpp/grpc_transport.h"

#include <memory>

#include "absl/synchronization/notification.h"
#include "client/cpp/server_messages.h"
#include "gtest/gtest.h"
#include "tests/support/fake_scoring_service.h"

namespace logprobd::client {
namespace {

// Regression: a thread of gRPC could release the last reference to a channel when the transport was
// gone. It then waited for itself, and gRPC aborted in grpc_cq_internal_unref.
TEST(GrpcTransportTest, OutlivesItsStreams) {
  testing::FakeScoringServer server;
  absl::Notification transport_is_gone, stream_is_gone;
  bool has_outlived_transport = false;
  auto transport = std::make_unique<GrpcTransport>(
      GrpcTransport::Options{.address = server.address(), .channels = 1});
  // The last thing that the stream releases. It gives a transport that does not wait for it the
  // time to end.
  std::shared_ptr<void> last(nullptr, [&](void*) {
    has_outlived_transport =
        transport_is_gone.WaitForNotificationWithTimeout(absl::Milliseconds(200));
    stream_is_gone.Notify();
  });
  std::shared_ptr<MessageStream> stream;
  stream = transport->OpenStream(kScoreStreamMethod,
                                 {.received = [last = std::move(last)](const grpc::ByteBuffer&) {},
                                  .ended = [&stream](const absl::Status&) { stream.reset(); }});
  stream->Start();

  transport.reset();
  transport_is_gone.Notify();

  ASSERT_TRUE(stream_is_gone.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_FALSE(has_outlived_transport);
}

}  // namespace
}  // namespace logprobd::client
