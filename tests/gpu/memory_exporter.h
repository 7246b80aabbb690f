#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "server/base/score_request.h"

namespace logprobd::testing {

/// Another process that allocates memory on a GPU and exports its handle, as the process of a
/// client does. Calls abort if the process does not answer.
class MemoryExporter {
 public:
  /// Starts this program again with kExporterArgument.
  MemoryExporter();
  /// Ends the process.
  ~MemoryExporter();
  MemoryExporter(const MemoryExporter&) = delete;
  MemoryExporter& operator=(const MemoryExporter&) = delete;

  /// Copies `bytes` to `offset` of an allocation of `allocation_bytes` bytes on GPU `gpu` and
  /// returns their slice, or nothing if the GPU does not share memory.
  std::optional<DeviceSlice> Export(int32_t gpu, int64_t allocation_bytes, int64_t offset,
                                    absl::Span<const std::byte> bytes);
  /// Frees the last allocation.
  void Free();
  /// Kills the process, which frees nothing before.
  void Kill();

 private:
  pid_t process_ = -1;
  int to_ = -1;
  int from_ = -1;
};

/// The main function of the process: serves the MemoryExporter that started the program with
/// kExporterArgument.
inline constexpr char kExporterArgument[] = "--export-memory";
int RunMemoryExporter();

}  // namespace logprobd::testing
