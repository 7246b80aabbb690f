#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/head_info.h"
#include "server/weights/regular_file.h"

// Strict reading of the safetensors format: headers, index files, dtypes and layout.

namespace logprobd {

/// Largest header in bytes, as in the format's reference implementation.
inline constexpr int64_t kSafetensorsHeaderBytesMax = 100'000'000;
/// Most tensors in one file: more than twice as many as the largest published models have in total.
inline constexpr int64_t kSafetensorsTensorsMax = 500'000;

/// One tensor of a safetensors file.
struct TensorEntry {
  std::string name;
  std::string dtype;  ///< Name in the file: "BF16", "F8_E4M3", ...
  std::vector<int64_t> shape;
  int64_t file_begin = 0;  ///< Offset in the file in bytes; any alignment.
  int64_t file_end = 0;    ///< End of the data, exclusive.
};

/// The tensors of a safetensors file that the caller selected.
struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  ///< The selected tensors, in the header's order.
  int64_t num_tensors = 0;           ///< Number of all tensors in the file.

  /// Returns null if the file has no such tensor or it was not selected.
  const TensorEntry* Find(absl::string_view name) const;
};

/// Reads and checks the header of a safetensors file. Checks every entry and keeps those for which
/// `selects` returns true. Memory and time are bounded whatever the file contains.
///
/// INVALID_ARGUMENT says what is wrong and where: length field, JSON, UTF-8, a repeated name, an
/// entry's fields, dtype, shape, offsets, holes, overlaps, or bytes missing or left over at the
/// end. DATA_LOSS: `file` cannot be read.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(
    const RandomAccessBytes& file, absl::FunctionRef<bool(absl::string_view)> selects);

/// Maps a tensor name to a file name relative to the index.
using WeightMap = absl::flat_hash_map<std::string, std::string>;

/// Reads model.safetensors.index.json. Checks every entry of its weight_map and keeps those for
/// which `selects` returns true. INVALID_ARGUMENT: malformed JSON, a repeated name, or a value that
/// does not name a .safetensors file. PERMISSION_DENIED: an absolute path or one with "..", so that
/// an index never leads out of its folder.
absl::StatusOr<WeightMap> ReadSafetensorsIndex(const RandomAccessBytes& file,
                                               absl::FunctionRef<bool(absl::string_view)> selects);

/// Checks one file name of an index, with the errors above.
absl::Status CheckShardName(absl::string_view file_name);

/// Largest dimension or offset that the schema of the format allows.
inline constexpr int64_t kSafetensorsSizeMax = (int64_t{1} << 48) - 1;

/// Returns the size of a tensor in bytes. INVALID_ARGUMENT: an unknown dtype, more than 2^63
/// elements or bits, or, with a dtype below 8 bits, a last byte that is not full.
absl::StatusOr<int64_t> TensorBytes(absl::string_view dtype, const std::vector<int64_t>& shape);

/// Checks that the ranges [begin, end) of all tensors cover 0 to `data_bytes` without holes and
/// overlaps. Sorts `spans`.
absl::Status CheckSpans(std::vector<std::pair<int64_t, int64_t>>& spans, int64_t data_bytes);

/// Returns the type for a safetensors dtype name, or nullopt for a dtype that heads cannot have.
inline std::optional<Dtype> ServedDtype(absl::string_view name) {
  if (name == "BF16") return Dtype::kBf16;
  if (name == "F16") return Dtype::kF16;
  if (name == "F32") return Dtype::kF32;
  return std::nullopt;
}

}  // namespace logprobd
