#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/weights/random_access_bytes.h"

namespace logprobd {

/// Longest header, as in the format's own reader.
inline constexpr int64_t kSafetensorsHeaderBytesMax = 100'000'000;
/// Most tensors of one file: more than twice what the largest published models have in all.
inline constexpr int64_t kSafetensorsTensorsMax = 500'000;

/// One tensor of a safetensors file.
struct TensorEntry {
  std::string name;
  std::string dtype;  ///< As in the file: "BF16", "F8_E4M3", ...
  std::vector<int64_t> shape;
  int64_t file_begin = 0;  ///< Bytes from the start of the file; any alignment.
  int64_t file_end = 0;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  ///< The wanted ones, in the header's order.
  int64_t num_tensors = 0;           ///< All.

  /// Null when it is not there or was not wanted.
  const TensorEntry* Find(absl::string_view name) const;
};

/// Reads and checks the header of a safetensors file. Every entry is checked, those for which
/// `wanted` is true are kept; memory and time are bounded whatever the file says.
///
/// INVALID_ARGUMENT says what is wrong and where: length field, JSON, UTF-8, a repeated name, an
/// entry's fields, dtype, shape, offsets, holes, overlaps, bytes missing or left over at the end.
/// DATA_LOSS when `file` cannot be read.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(
    const RandomAccessBytes& file, absl::FunctionRef<bool(absl::string_view)> wanted);

}  // namespace logprobd
