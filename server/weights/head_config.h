#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// The values of config.json that describe a model's head. A value is nullopt if it is absent or
/// null.
struct HeadConfig {
  std::string model_type = "unknown";
  std::optional<int64_t> hidden_size;
  std::optional<int64_t> vocab_size;
  std::optional<bool> tied;
  std::optional<bool> has_bias;
  double scale = 1.0;    ///< Factor in z = cap(scale * (h . w) + bias).
  double softcap = 0.0;  ///< Cap of the logits, or 0 if there is none.
  std::string quantization_method;
  std::vector<std::string> warnings;
};

/// Maximum size of a config.json that is read, in bytes.
inline constexpr int64_t kConfigBytesMax = int64_t{16} << 20;

/// Parses a config.json. For each key, a nested text configuration takes precedence over the top
/// level; README.md lists keys and families. NaN and Infinity, which Python writes, count as null.
/// Returns INVALID_ARGUMENT if the text is not JSON, or if a value has the wrong type or range.
absl::StatusOr<HeadConfig> ParseHeadConfig(absl::string_view json);

/// Returns a config.json for the head of the model that `json` describes, stored alone: the keys
/// that ParseHeadConfig reads or warns of, the given sizes, and no tie. Keys are sorted. Returns
/// INVALID_ARGUMENT if the text is not a JSON object.
absl::StatusOr<std::string> ConfigOfHead(absl::string_view json, int64_t hidden_size,
                                         int64_t vocab_size);

}  // namespace logprobd
