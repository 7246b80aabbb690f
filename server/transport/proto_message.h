#pragma once

#include "absl/status/status.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/support/byte_buffer.h"

namespace logprobd {

/// Most bytes of a request that Protobuf parses: those hold names and numbers only.
inline constexpr size_t kSmallMessageBytesMax = 64 << 10;

/// Parses a small message. INVALID_ARGUMENT when it is malformed (a typed method would answer
/// UNIMPLEMENTED) or too large.
absl::Status ParseSmallMessage(const grpc::ByteBuffer& bytes,
                               google::protobuf::MessageLite& message);

grpc::ByteBuffer SerializeMessage(const google::protobuf::MessageLite& message);

}  // namespace logprobd
