#pragma once

#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/weights/random_access_bytes.h"

namespace logprobd {

/// Tensor name -> file name, relative to the index.
using WeightMap = absl::flat_hash_map<std::string, std::string>;

/// Reads model.safetensors.index.json and keeps the entries of its weight_map that are `wanted`.
/// Every entry is checked: INVALID_ARGUMENT for malformed JSON, a repeated name, a value that is no
/// name of a .safetensors file; PERMISSION_DENIED for an absolute path or one with "..", so that an
/// index never leads out of its folder.
absl::StatusOr<WeightMap> ReadSafetensorsIndex(const RandomAccessBytes& file,
                                               absl::FunctionRef<bool(absl::string_view)> wanted);

/// The check of one file name of an index.
absl::Status CheckShardName(absl::string_view file_name);

}  // namespace logprobd
