#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cli/tensor_files/tensor.h"

namespace logprobd::client {

/// Maps a NumPy .npy file (format versions 1 to 3, C order, little-endian numbers, no pickled
/// objects). INVALID_ARGUMENT says what is wrong with it.
absl::StatusOr<Tensor> ReadNpy(const std::string& path);

/// Writes a version 1 .npy file. `descr` is NumPy's type text, as "<f4".
absl::Status WriteNpy(const std::string& path, absl::string_view descr,
                      absl::Span<const int64_t> shape, absl::Span<const std::byte> data);

}  // namespace logprobd::client
