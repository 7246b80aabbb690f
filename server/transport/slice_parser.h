#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/score_request.h"

namespace logprobd {

/// Most bytes of a serialised slice: known fields take 133, the rest is room for newer clients'.
inline constexpr int64_t kSliceBytesMax = 512;

/// Offsets of rows that are read where they lie: what copies of a CPU and of a GPU like.
inline constexpr int64_t kSharedMemoryAlignment = 64;
inline constexpr int64_t kCudaIpcAlignment = 16;

// Read a serialised proto SharedMemorySlice or CudaIpcSlice. INVALID_ARGUMENT, naming the field
// ("shared_memory.offset"), for what Protobuf refuses and for: a field given twice or with another
// wire type, groups, ids, handles and uuids that have another size or are missing, an offset that
// is not aligned, and ranges that end beyond 2^63.
absl::StatusOr<SharedMemorySlice> ParseSharedMemorySlice(absl::Span<const std::byte> bytes);
absl::StatusOr<CudaIpcSlice> ParseCudaIpcSlice(absl::Span<const std::byte> bytes);

}  // namespace logprobd
