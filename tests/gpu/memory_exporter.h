#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "server/base/score_request.h"

namespace logprobd::testing {

/// Another process that has memory on a GPU and passes on its handle, as a client's trainer does.
/// Its calls abort when the process does not answer.
class MemoryExporter {
 public:
  /// Starts this program again, with kArgument.
  MemoryExporter();
  /// Ends the process.
  ~MemoryExporter();
  MemoryExporter(const MemoryExporter&) = delete;
  MemoryExporter& operator=(const MemoryExporter&) = delete;

  /// Copies `bytes` to `offset` in an allocation of `allocation_bytes` on GPU `gpu`; the slice of
  /// it. Nothing where the GPU does not share memory.
  std::optional<DeviceSlice> Export(int32_t gpu, int64_t allocation_bytes, int64_t offset,
                                    absl::Span<const std::byte> bytes);
  /// Frees what was exported last.
  void Free();
  /// Ends the process, without freeing anything.
  void Kill();

 private:
  pid_t process_ = -1;
  int to_ = -1;
  int from_ = -1;
};

/// What the program does when its only argument is kExporterArgument: serves the MemoryExporter
/// that started it.
inline constexpr char kExporterArgument[] = "--export-memory";
int RunMemoryExporter();

}  // namespace logprobd::testing
