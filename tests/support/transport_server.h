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

/// Returns options for a free loopback port and the message limit of FakeHeadInfo, 1 MiB.
GrpcServer::Options TestServerOptions();

/// Returns the address of an admin listener that only this process uses.
std::string TestAdminAddress();

/// A GrpcServer over a fake head, and a channel to it.
struct TransportServer {
  explicit TransportServer(const GrpcServer::Options& options = TestServerOptions(),
                           HeadInfo head_info = FakeHeadInfo(), bool with_head = true,
                           const Clock& clock = Clock::Steady());

  std::string address() const;
  std::shared_ptr<grpc::Channel> NewChannel() const;

  Metrics metrics;  // outlives the requests that the head holds
  std::shared_ptr<FakeHead> head;
  FakeRegistry registry;
  std::unique_ptr<GrpcServer> server;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Scoring::Stub> stub;
};

/// Returns a valid bf16 request for the head of FakeHeadInfo, with targets 0, 1, 2, ...
v1::ScoreRequest ValidRequest(uint32_t rows = 2);

/// Returns the bytes of `values` on the wire.
template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

/// Returns the values in `bytes`. Drops an incomplete value at the end.
template <typename T>
std::vector<T> ValuesOf(absl::string_view bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  bytes.copy(reinterpret_cast<char*>(values.data()), values.size() * sizeof(T));
  return values;
}

/// Returns `bytes` in slices of `slice_bytes`; 0 means one slice.
grpc::ByteBuffer BufferOf(absl::string_view bytes, size_t slice_bytes = 0);
std::string StringOf(const grpc::ByteBuffer& buffer);

/// Sends `message` unchanged to a unary method and waits for the response.
grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const grpc::ByteBuffer& message, grpc::ByteBuffer& answer,
                     grpc::ClientContext& context);

/// Calls a unary method and half-closes the call without a message.
grpc::Status CallWithoutMessage(const std::shared_ptr<grpc::Channel>& channel,
                                const std::string& method);

}  // namespace logprobd::testing
