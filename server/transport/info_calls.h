#pragma once

#include <optional>
#include <string>
#include <vector>

#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/base/clock.h"
#include "server/base/served_head.h"
#include "server/metrics/metrics.h"
#include "server/transport/same_host_access.h"
#include "server/transport/score_handler.h"

namespace logprobd {

/// What ListHeads says of the server itself.
struct ServerInfo {
  std::string version;
  std::vector<std::string> transports;  ///< "tcp", "unix", "shm", "cuda_ipc".
  std::optional<SameHostAccess::Facts> local = std::nullopt;
};

/// Answers ListHeads. gRPC owns what is returned.
grpc::ServerUnaryReactor* StartListHeads(const HeadRegistry& heads, const ServerInfo& server,
                                         Metrics& metrics, const Clock& clock,
                                         grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& request,
                                         grpc::ByteBuffer& response);

/// Answers Verify. gRPC owns what is returned. It counts as work of `handler`; a probe that takes
/// long (the whole weight is read) ends when its call is cancelled or its deadline passes.
grpc::ServerUnaryReactor* StartVerify(ScoreHandler& handler, grpc::CallbackServerContext& context,
                                      const grpc::ByteBuffer& request, grpc::ByteBuffer& response);

}  // namespace logprobd
