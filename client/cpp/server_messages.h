#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// The small messages, between the wire and this library's types. A parse that fails is INTERNAL.
grpc::ByteBuffer EncodeListHeads();
absl::StatusOr<ServerInfo> ParseListHeads(const grpc::ByteBuffer& body);
grpc::ByteBuffer EncodeVerify(const VerifyArgs& args);
absl::StatusOr<VerifyReport> ParseVerify(const grpc::ByteBuffer& body);

}  // namespace logprobd::client
