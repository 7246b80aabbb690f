#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/score_request.h"

namespace logprobd {

/// Largest serialised slice in bytes. The known fields take 133; the rest is for fields of newer
/// clients.
inline constexpr int64_t kSliceBytesMax = 512;

/// Required alignment of offsets in bytes, for efficient copies by a CPU and by a GPU.
inline constexpr int64_t kSharedMemoryAlignment = 64;
inline constexpr int64_t kCudaIpcAlignment = 16;

// Both functions parse a serialised message. INVALID_ARGUMENT names the field, such as
// "shared_memory.offset". They refuse what Protobuf refuses, and in addition: a field given twice
// or with another wire type, groups, ids, handles and uuids that are missing or have another size,
// an offset that is not aligned, and a range that ends beyond 2^63.
absl::StatusOr<SharedMemorySlice> ParseSharedMemorySlice(absl::Span<const std::byte> bytes);
absl::StatusOr<CudaIpcSlice> ParseCudaIpcSlice(absl::Span<const std::byte> bytes);

}  // namespace logprobd
