#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "grpcpp/support/byte_buffer.h"

namespace logprobd {

/// A received message in the slices in which gRPC read it. Nothing is copied: the slices stay
/// alive, and charged to gRPC's memory quota, as long as `owner`.
struct PayloadSlices {
  std::shared_ptr<void> owner;
  std::vector<absl::Span<const std::byte>> pieces;
  int64_t bytes = 0;
};

PayloadSlices SlicesOf(const grpc::ByteBuffer& message);

}  // namespace logprobd
