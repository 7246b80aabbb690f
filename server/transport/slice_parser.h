#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/score_request.h"

namespace logprobd {

/// Maximum size of a serialised slice in bytes. The known fields take 133 bytes; the rest is for
/// fields of newer clients.
inline constexpr int64_t kSliceBytesMax = 512;

/// Required alignment of offsets in bytes, for efficient copies by a CPU and by a GPU.
inline constexpr int64_t kSharedMemoryAlignment = 64;
inline constexpr int64_t kCudaIpcAlignment = 16;

// Both functions parse a serialised message. An INVALID_ARGUMENT error names the field, such as
// "shared_memory.offset". They refuse everything that Protobuf refuses, and in addition: a field
// that occurs twice or has another wire type; a group; an id, handle or uuid that is missing or has
// another size; an offset that is not aligned; and a range that ends beyond 2^63.
absl::StatusOr<SharedMemorySlice> ParseSharedMemorySlice(absl::Span<const std::byte> bytes);
absl::StatusOr<CudaIpcSlice> ParseCudaIpcSlice(absl::Span<const std::byte> bytes);

}  // namespace logprobd
