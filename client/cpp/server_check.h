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

/// Limit of each request of a check.
inline constexpr absl::Duration kServerCheckTimeout = absl::Seconds(5);

/// `listed` is the answer to ListHeads that `info` was read from; empty without one.
using ServerCheckDone = absl::AnyInvocable<void(const absl::StatusOr<ServerInfo>& info,
                                                const grpc::ByteBuffer& listed) &&>;

/// Finds out whether a server can be used: asks for its health over each of its `connections`,
/// then for its heads. A server without a health service is judged by its heads alone. `done` is
/// called once, perhaps before this returns: with the heads, at least one, or with UNAVAILABLE and
/// why. `server` must live until then.
void StartServerCheck(RpcTransport& server, int32_t connections, ServerCheckDone done);

/// How a failed request reads as ServerState::reason: its code and its message.
std::string ReasonOf(const absl::Status& status);

}  // namespace logprobd::client
