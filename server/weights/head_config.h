#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/weights/head_rules.h"

namespace logprobd {

/// What config.json says about the head and the embedding being one tensor.
struct TieFlag {
  /// The flag at the level that the model's class reads; nullopt if it is not set there.
  std::optional<bool> stated;
  /// The flag at other levels, where `stated` is nullopt; nullopt if it is not set there either.
  std::optional<bool> elsewhere;
  /// What the class assumes if the flag is not set; nullopt for an unknown type.
  std::optional<bool> by_default;
  /// Levels of an unknown type contradict each other.
  bool is_contradictory = false;
  /// The class never ties, or always, whatever the flag says.
  bool is_never = false;
  bool is_always = false;
  /// The flag as messages name it: "tie_word_embeddings" or "text_config.tie_word_embeddings".
  std::string name = "tie_word_embeddings";
};

/// What an operator says about the logits instead of config.json.
struct LogitOverrides {
  std::optional<double> softcap = std::nullopt;  ///< The cap, or 0 for none.
  std::optional<double> scale = std::nullopt;    ///< The factor of the products.
  std::vector<std::string> ignored_keys = {};    ///< Keys and tensors without effect.
  bool strict = false;                           ///< Refuse a model type that is not known.
};

/// The values of config.json that describe a model's head. A value is nullopt if it is absent or
/// null.
struct HeadConfig {
  std::string model_type = "unknown";
  const TypeRule* rule = nullptr;  ///< Rule of the model's type, or null if it is not known.
  std::optional<int64_t> hidden_size;
  std::optional<int64_t> vocab_size;
  TieFlag tied;
  std::optional<bool> has_bias;
  double scale = 1.0;    ///< Factor in z = cap(scale * (h . w) + bias).
  double softcap = 0.0;  ///< Cap of the logits, or 0 if there is none.
  std::string quantization_method;
  std::vector<std::string> ignored_names;  ///< LogitOverrides::ignored_keys.
  std::vector<std::string> warnings;
};

/// Maximum size of a config.json that is read, in bytes.
inline constexpr int64_t kConfigBytesMax = int64_t{16} << 20;

/// Parses a config.json by the rules of head_rules.json. For each key, the level of the text model
/// takes precedence over the levels that enclose it. NaN and Infinity, which Python writes, count
/// as null. Returns INVALID_ARGUMENT if the text is not JSON or a value has the wrong type or
/// range, and UNIMPLEMENTED if the model computes its logits in a way that is not known or not
/// served. The message says how to override that.
absl::StatusOr<HeadConfig> ParseHeadConfig(absl::string_view json,
                                           const LogitOverrides& overrides = {});

/// Returns a config.json for the head of the model that `json` describes, stored alone: the keys
/// that ParseHeadConfig reads or refuses, except `ignored_keys`, the given sizes, and no tie unless
/// the flag has another meaning. Keys are sorted. Returns INVALID_ARGUMENT if the text is not a
/// JSON object.
absl::StatusOr<std::string> ConfigOfHead(absl::string_view json, int64_t hidden_size,
                                         int64_t vocab_size,
                                         const std::vector<std::string>& ignored_keys = {});

}  // namespace logprobd
