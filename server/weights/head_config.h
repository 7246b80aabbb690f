#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// What config.json says about a model's head. Absent values were absent or null.
struct HeadConfig {
  std::string model_type = "unknown";
  std::optional<int64_t> hidden_size;
  std::optional<int64_t> vocab_size;
  std::optional<bool> tied;
  std::optional<bool> has_bias;
  double scale = 1.0;    ///< z = cap(scale * (h . w) + bias).
  double softcap = 0.0;  ///< 0: none.
  std::string quantization_method;
  std::vector<std::string> warnings;
};

/// Longest config.json that is read.
inline constexpr int64_t kConfigBytesMax = int64_t{16} << 20;

/// Resolves the text of a config.json. A nested text configuration comes before the top level, key
/// by key; keys and families: README.md. INVALID_ARGUMENT for what is not JSON (NaN and Infinity,
/// which Python writes, are taken for null) and for a value of a wrong type or range.
absl::StatusOr<HeadConfig> ParseHeadConfig(absl::string_view json);

}  // namespace logprobd
