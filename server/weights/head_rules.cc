#include "server/weights/head_rules.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "server/base/errors.h"
#include "server/weights/head_rules_json.h"

namespace logprobd {
namespace {

using Json = nlohmann::json;

bool Contains(const std::vector<std::string>& all, absl::string_view wanted) {
  return std::find(all.begin(), all.end(), wanted) != all.end();
}

// Returns whether one of `parts` is in `text`.
bool HasOneOf(absl::string_view text, const std::vector<std::string>& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [text](const std::string& part) { return absl::StrContains(text, part); });
}

// Returns whether one of the words of `text`, which underscores separate, is in `wanted`.
bool HasWordOf(absl::string_view text, const std::vector<std::string>& wanted) {
  const std::vector<absl::string_view> words = absl::StrSplit(text, '_');
  return std::any_of(words.begin(), words.end(),
                     [&wanted](absl::string_view word) { return Contains(wanted, word); });
}

std::optional<double> DefaultOf(const Json& rule) {
  const auto found = rule.find("default");
  if (found == rule.end()) return std::nullopt;
  return found->is_boolean() ? static_cast<double>(found->get<bool>()) : found->get<double>();
}

ScaleRule::Op OpOf(const std::string& name) {
  if (name == "multiply") return ScaleRule::Op::kMultiply;
  if (name == "divide") return ScaleRule::Op::kDivide;
  if (name == "over_hidden_size") return ScaleRule::Op::kOverHiddenSize;
  LOGPROBD_CHECK(name == "inverse_sqrt_hidden_size", name);
  return ScaleRule::Op::kInverseSqrtHiddenSize;
}

TypeRule::Tie TieOf(const Json& entry) {
  const auto found = entry.find("tied");
  if (found == entry.end()) return TypeRule::Tie::kUntiedByDefault;
  if (found->is_boolean()) return TypeRule::Tie::kTiedByDefault;
  const std::string text = found->get<std::string>();
  LOGPROBD_CHECK(text == "never" || text == "always", text);
  return text == "never" ? TypeRule::Tie::kNever : TypeRule::Tie::kAlways;
}

TypeRule ParseType(const Json& entry) {
  TypeRule rule;
  rule.tie = TieOf(entry);
  rule.tie_level = entry.value("tie_level", "");
  rule.tie_any_level = entry.value("tie_any_level", false);
  rule.tie_key = entry.value("tie_key", "");
  rule.text_level = entry.value("text", "");
  rule.inner = entry.value("inner", false);
  rule.head = entry.value("head", "");
  rule.embedding = entry.value("embedding", "");
  for (const Json& scale : entry.value("scale", Json::array())) {
    rule.scales.push_back({scale.value("key", ""), scale.value("fallback", ""),
                           OpOf(scale.at("op").get<std::string>()), DefaultOf(scale)});
  }
  if (const auto softcap = entry.find("softcap"); softcap != entry.end()) {
    rule.softcap = SoftcapRule{softcap->at("key").get<std::string>(), DefaultOf(*softcap)};
  }
  if (const auto vocab = entry.find("vocab"); vocab != entry.end()) {
    rule.vocab_key = vocab->at("key").get<std::string>();
    rule.vocab_unless = vocab->value("unless", "");
    if (vocab->contains("default")) rule.vocab_default = vocab->at("default").get<int64_t>();
  }
  rule.no_effect = entry.value("no_effect", std::vector<std::string>());
  rule.refused = entry.value("refused", "");
  rule.needs_key = entry.value("needs_key", false);
  rule.plain_vocab = entry.value("plain_vocab", std::vector<int64_t>());
  return rule;
}

HeadRules Parse(absl::string_view text) {
  const Json json = Json::parse(text);
  const auto list = [&json](const char* key) {
    return json.at(key).get<std::vector<std::string>>();
  };
  HeadRules rules;
  rules.transformers_version = json.at("transformers").get<std::string>();
  rules.head_names = list("head_names");
  rules.embedding_names = list("embedding_names");
  rules.config_levels = list("config_levels");
  rules.hidden_size_keys = list("hidden_size_keys");
  rules.quantized_suffixes = list("quantized_suffixes");
  rules.head_siblings = list("head_siblings");
  rules.adapter_parts = list("adapter_parts");
  rules.head_words = list("head_words");
  rules.head_parts = list("head_parts");
  rules.not_head_parts = list("not_head_parts");
  rules.not_heads = list("not_heads");
  rules.logit_keys = list("logit_keys");
  rules.harmless_keys = list("harmless_keys");
  rules.harmless_key_words = list("harmless_key_words");
  rules.text_level_words = list("text_level_words");
  rules.other_level_words = list("other_level_words");
  rules.logit_tensor_parts = list("logit_tensor_parts");
  for (const auto& [type, entry] : json.at("types").items()) {
    rules.types[type] = ParseType(entry);
    // A key that transforms the logits of one type is not ignored silently for another.
    for (const ScaleRule& scale : rules.types[type].scales) {
      if (scale.op != ScaleRule::Op::kInverseSqrtHiddenSize) rules.logit_keys.push_back(scale.key);
    }
  }
  return rules;
}

}  // namespace

bool TypeRule::Transforms(absl::string_view key) const {
  return (softcap.has_value() && softcap->key == key) ||
         std::any_of(scales.begin(), scales.end(), [key](const ScaleRule& scale) {
           return scale.key == key || scale.fallback == key;
         });
}

const HeadRules& HeadRules::Get() {
  static const HeadRules* const rules = new HeadRules(Parse(HeadRulesJson()));
  return *rules;
}

const TypeRule* HeadRules::Find(absl::string_view model_type) const {
  const auto found = types.find(model_type);
  return found == types.end() ? nullptr : &found->second;
}

bool HeadRules::MayBeHead(absl::string_view name) const {
  const std::string lower = absl::AsciiStrToLower(name);
  bool is_candidate = Contains(head_parts, lower);
  for (const absl::string_view part : absl::StrSplit(lower, '.')) {
    if (Contains(not_heads, part) || (!is_candidate && Contains(not_head_parts, part))) {
      return false;
    }
    is_candidate = is_candidate || Contains(head_parts, part) || HasWordOf(part, head_words);
  }
  return is_candidate;
}

bool HeadRules::MayShiftLogits(absl::string_view name) const {
  const std::string lower = absl::AsciiStrToLower(name);
  bool is_candidate = false;
  for (const absl::string_view part : absl::StrSplit(lower, '.')) {
    if (Contains(not_head_parts, part)) return false;
    is_candidate = is_candidate || Contains(logit_tensor_parts, part);
  }
  return is_candidate;
}

bool HeadRules::MayChangeLogits(absl::string_view key) const {
  const std::string lower = absl::AsciiStrToLower(key);
  return !Contains(harmless_keys, lower) && !HasWordOf(lower, harmless_key_words) &&
         HasOneOf(lower, logit_keys);
}

bool HeadRules::IsOtherLevel(absl::string_view key) const {
  const std::string lower = absl::AsciiStrToLower(key);
  if (HasWordOf(lower, text_level_words)) return false;
  const std::vector<absl::string_view> words = absl::StrSplit(lower, '_');
  return std::any_of(words.begin(), words.end(), [this](absl::string_view word) {
    return std::any_of(other_level_words.begin(), other_level_words.end(),
                       [word](const std::string& start) { return absl::StartsWith(word, start); });
  });
}

}  // namespace logprobd
