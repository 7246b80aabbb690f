#include "client/cli/bench/row_memory.h"

#include <cstddef>
#include <memory>
#include <new>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace logprobd::client {

absl::StatusOr<RowBuffer> HeapRowMemory::Allocate(int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  // Zeroed, so that the pages are there before the first request is timed.
  std::shared_ptr<std::byte> memory(new (std::nothrow) std::byte[size](),
                                    std::default_delete<std::byte[]>());
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", bytes, " bytes of rows: send fewer or smaller requests"));
  }
  absl::Span<std::byte> span(memory.get(), size);
  return RowBuffer(std::move(memory), span, /*is_shared=*/false);
}

}  // namespace logprobd::client
