#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/support/byte_buffer.h"

namespace logprobd {

/// The slices into which gRPC read a message, which are not copied. `owner` keeps them alive, and
/// they count against gRPC's memory quota until it is released.
struct PayloadSlices {
  std::shared_ptr<void> owner;
  std::vector<absl::Span<const std::byte>> pieces;
  int64_t bytes = 0;
};

/// Returns the slices of `message`; none when gRPC received no message.
PayloadSlices SlicesOf(const grpc::ByteBuffer& message);

/// Largest request that Protobuf parses, in bytes. Such requests hold only names and numbers.
inline constexpr size_t kSmallMessageBytesMax = 64 << 10;

/// Parses a small message. Returns INVALID_ARGUMENT if it is malformed or too large.
absl::Status ParseSmallMessage(const grpc::ByteBuffer& bytes,
                               google::protobuf::MessageLite& message);

grpc::ByteBuffer SerializeMessage(const google::protobuf::MessageLite& message);

}  // namespace logprobd
