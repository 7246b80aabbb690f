#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// How a key of config.json scales the logits.
struct ScaleRule {
  enum class Op {
    kMultiply,              ///< z *= value
    kDivide,                ///< z /= value
    kOverHiddenSize,        ///< z *= value / hidden_size
    kInverseSqrtHiddenSize  ///< z /= sqrt(hidden_size) if the value is true
  };
  std::string key;       ///< "": the default always applies.
  std::string fallback;  ///< Key that counts if `key` is missing, or "".
  Op op = Op::kMultiply;
  std::optional<double> default_value;  ///< For a missing key; nullopt: no scale. A flag is 0 or 1.
};

/// The soft cap of a model type: the key of config.json, and the value if the key is missing.
struct SoftcapRule {
  std::string key;
  std::optional<double> default_value;
};

/// What is known of a model type.
struct TypeRule {
  enum class Tie {
    kUntiedByDefault,
    kTiedByDefault,
    kNever,  ///< The model's class ties nothing, whatever the flag says.
    kAlways  ///< The class reads the flag as true.
  };
  Tie tie = Tie::kUntiedByDefault;
  std::string tie_level;       ///< Level of config.json whose tie flag counts; "": the top.
  bool tie_any_level = false;  ///< The model is tied if the flag at the top or of the text is true.
  std::string tie_key;         ///< A key that takes precedence over tie_word_embeddings, or "".
  std::string text_level;      ///< Level of the text model if it is not in config_levels, or "".
  bool inner = false;          ///< The class of the text model computes the logits.
  std::string head;            ///< Name of the head's tensor if it is not in head_names, or "".
  std::string embedding;       ///< Name of the embedding if it is not in embedding_names, or "".
  std::vector<ScaleRule> scales;
  std::optional<SoftcapRule> softcap;
  std::string vocab_key;  ///< Key of the number of valid ids, or "" for vocab_size.
  /// Flag, true if it is missing, that makes vocab_size count after all; "" if there is none.
  std::string vocab_unless;
  std::optional<int64_t> vocab_default;  ///< Its value if the key is missing.
  std::vector<std::string> no_effect;    ///< Keys that seem to change the logits but do not.
  bool needs_key = false;  ///< One key of `scales` must be set, as their default is not known.
  std::string refused;     ///< Why the type is not served, or "".
  std::vector<int64_t> plain_vocab;  ///< Values of vocab_size with which it is served all the same.

  /// Returns whether `key` is one of `scales` or the soft cap.
  bool Transforms(absl::string_view key) const;
};

/// The rules of client/python/logprobd/head_rules.json, which the Python client reads, too.
/// README.md of this folder describes them.
struct HeadRules {
  std::string transformers_version;  ///< Release of transformers that the types describe.
  std::vector<std::string> head_names;
  std::vector<std::string> embedding_names;
  std::vector<std::string> config_levels;
  std::vector<std::string> hidden_size_keys;
  std::vector<std::string> quantized_suffixes;
  std::vector<std::string> head_siblings;
  std::vector<std::string> adapter_parts;
  std::vector<std::string> head_words;
  std::vector<std::string> head_parts;
  std::vector<std::string> not_head_parts;
  std::vector<std::string> not_heads;
  std::vector<std::string> logit_keys;
  std::vector<std::string> harmless_keys;
  std::vector<std::string> harmless_key_words;
  std::vector<std::string> text_level_words;
  std::vector<std::string> other_level_words;
  std::vector<std::string> logit_tensor_parts;
  absl::flat_hash_map<std::string, TypeRule> types;

  /// Returns the rules of this build.
  static const HeadRules& Get();

  /// Returns the rule of a model type, or null if the type is not known.
  const TypeRule* Find(absl::string_view model_type) const;

  /// Returns whether a tensor of this name may be a head: one of its parts, which dots separate, is
  /// in head_parts or has one of head_words, none before it is in not_head_parts, and none at all
  /// in not_heads.
  bool MayBeHead(absl::string_view name) const;

  /// Returns whether a tensor of this name may scale or shift the logits of a head that is known.
  bool MayShiftLogits(absl::string_view name) const;

  /// Returns whether the name of a key suggests that it changes the logits.
  bool MayChangeLogits(absl::string_view key) const;

  /// Returns whether a part of config.json describes something other than the text model.
  bool IsOtherLevel(absl::string_view key) const;
};

}  // namespace logprobd
