#pragma once

#include <string>
#include <vector>

#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/base/clock.h"
#include "server/base/served_head.h"
#include "server/metrics/metrics.h"

namespace logprobd {

/// What ListHeads says of the server itself.
struct ServerFacts {
  std::string version;
  std::vector<std::string> transports;  ///< "tcp", "unix".
};

/// Answers ListHeads. gRPC owns what is returned.
grpc::ServerUnaryReactor* StartListHeads(const HeadRegistry& heads, const ServerFacts& server,
                                         Metrics& metrics, const Clock& clock,
                                         grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& request,
                                         grpc::ByteBuffer& response);

/// Answers Verify. gRPC owns what is returned. The probe cannot be cancelled; it is short.
grpc::ServerUnaryReactor* StartVerify(const HeadRegistry& heads, Metrics& metrics,
                                      const Clock& clock, grpc::CallbackServerContext& context,
                                      const grpc::ByteBuffer& request, grpc::ByteBuffer& response);

}  // namespace logprobd
