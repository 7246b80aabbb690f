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

/// The data that ListHeads returns about the server itself.
struct ServerInfo {
  std::string version;
  std::vector<std::string> transports;  ///< Some of "tcp", "unix", "shm" and "cuda_ipc".
  std::optional<SameHostAccess::Info> same_host = std::nullopt;
};

/// Answers a ListHeads call. gRPC owns the returned reactor.
grpc::ServerUnaryReactor* StartListHeads(const HeadRegistry& heads, const ServerInfo& server,
                                         Metrics& metrics, const Clock& clock,
                                         grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& request,
                                         grpc::ByteBuffer& response);

/// Answers a Verify call. gRPC owns the returned reactor. The call counts as work of `handler`. The
/// probe reads the whole weight, which may take a long time. It ends early when the call is
/// cancelled or its deadline passes.
grpc::ServerUnaryReactor* StartVerify(ScoreHandler& handler, grpc::CallbackServerContext& context,
                                      const grpc::ByteBuffer& request, grpc::ByteBuffer& response);

}  // namespace logprobd
