#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/rpc_transport.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// Receives the result of a check. `listed` is the encoded response to ListHeads, or empty after an
/// error.
using ServerCheckDone = absl::AnyInvocable<void(const absl::StatusOr<ServerInfo>& info,
                                                const grpc::ByteBuffer& listed) &&>;

/// Checks whether a server can be used: asks for its health over each of its `connections`, then
/// for its heads. A server without a health service must only list its heads. `done` is called
/// once, possibly before this returns, with at least one head, or with UNAVAILABLE and the reason.
/// `transport` must live until then.
void StartServerCheck(RpcTransport& transport, const std::string& server, int32_t connections,
                      ServerCheckDone done);

/// Formats a failed request's status for ServerState::reason: its code and its message.
std::string ReasonOf(const absl::Status& status);

}  // namespace logprobd::client
