#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "logprobd/v1/scoring.grpc.pb.h"
#include "logprobd/v1/scoring.pb.h"
#include "server/base/clock.h"
#include "server/metrics/metrics.h"
#include "server/transport/grpc_server.h"
#include "tests/support/fake_head.h"

namespace logprobd::testing {

inline constexpr char kScoreMethod[] = "/logprobd.v1.Scoring/Score";
inline constexpr char kScoreStreamMethod[] = "/logprobd.v1.Scoring/ScoreStream";

/// Listens on free loopback ports; message limit 1 MiB, as FakeHeadInfo says.
GrpcServer::Options TestServerOptions();

/// A GrpcServer over fakes, and a channel to it.
struct TransportServer {
  explicit TransportServer(const GrpcServer::Options& options = TestServerOptions(),
                           HeadInfo head_info = FakeHeadInfo(), bool with_head = true);

  std::string address() const;
  std::shared_ptr<grpc::Channel> NewChannel() const;

  Metrics metrics;  // outlives the requests that the head holds
  std::shared_ptr<FakeHead> head;
  FakeRegistry registry;
  std::unique_ptr<GrpcServer> server;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Scoring::Stub> stub;
};

/// A valid request for FakeHeadInfo's head, bf16, targets 0, 1, 2, ...
v1::ScoreRequest ValidRequest(uint32_t rows = 2);

/// `values` as the wire has them.
template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

/// The reverse; trailing bytes are dropped.
template <typename T>
std::vector<T> ValuesOf(absl::string_view bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  bytes.copy(reinterpret_cast<char*>(values.data()), values.size() * sizeof(T));
  return values;
}

/// `bytes` in slices of `slice_bytes` (0: one slice).
grpc::ByteBuffer BufferOf(absl::string_view bytes, size_t slice_bytes = 0);
std::string StringOf(const grpc::ByteBuffer& buffer);

/// Sends `message` as it is to a unary method and waits for the answer.
grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const grpc::ByteBuffer& message, grpc::ByteBuffer& answer,
                     grpc::ClientContext& context);

/// Opens a call to a unary method and closes it without a message.
grpc::Status CallWithoutMessage(const std::shared_ptr<grpc::Channel>& channel,
                                const std::string& method);

}  // namespace logprobd::testing
