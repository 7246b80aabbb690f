#include "server/weights/head_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/types/span.h"
#include "server/base/errors.h"
#include "server/weights/untrusted_text.h"

namespace logprobd {
namespace {

constexpr int kDepthMax = 64;
constexpr std::array<absl::string_view, 3> kNotFinite = {"NaN", "Infinity", "-Infinity"};

// Returns the length in bytes of the string literal at the front of `text`.
size_t StringLength(absl::string_view text) {
  for (size_t i = 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      return i + 1;
    }
  }
  return text.size();
}

}  // namespace

// Turns JSON as Python's json module writes it into strict JSON: NaN, Infinity and -Infinity
// outside strings become null. Returns INVALID_ARGUMENT for nesting deeper than 64 levels or a NUL.
absl::StatusOr<std::string> StrictJson(absl::string_view text) {
  std::string strict;
  strict.reserve(text.size());
  int depth = 0;
  while (!text.empty()) {
    size_t length = 1;
    absl::string_view written = text.substr(0, 1);
    switch (text.front()) {
      case '\0':
        return absl::InvalidArgumentError("it holds a NUL");
      case '"':
        length = StringLength(text);
        written = text.substr(0, length);
        break;
      case '{':
      case '[':
        if (++depth > kDepthMax) {
          return absl::InvalidArgumentError(
              absl::StrCat("it is nested deeper than ", kDepthMax, " levels"));
        }
        break;
      case '}':
      case ']':
        --depth;
        break;
      default:
        for (const absl::string_view name : kNotFinite) {
          if (absl::StartsWith(text, name)) {
            length = name.size();
            written = "null";
          }
        }
        break;
    }
    strict.append(written.data(), written.size());
    text.remove_prefix(length);
  }
  return strict;
}

namespace {

using Json = nlohmann::json;

constexpr int64_t kDimensionMax = int64_t{1} << 31;

constexpr std::array<absl::string_view, 3> kHiddenKeys = {"hidden_size", "n_embd", "d_model"};
// Keys whose value multiplies the logits: the keys of Cohere and Falcon-H1, and three spellings
// that muP models use.
constexpr std::array<absl::string_view, 5> kMultipliers = {
    "logit_scale", "lm_head_multiplier", "output_multiplier", "output_multiplier_scale",
    "mup_output_mult"};
// Keys that seem to change the head's logits but do not.
constexpr std::array<absl::string_view, 6> kHarmless = {
    "final_logit_softcapping", "logits_scaling",  "num_logits_to_keep",
    "logits_to_keep",          "mup_denominator", "logit_scale_init_value"};
// Other keys that describe a head, besides its sizes and the tie flag.
constexpr std::array<absl::string_view, 6> kHeadKeys = {
    "architectures",  "model_type",     "lm_head_bias",
    "logits_scaling", "dim_model_base", "final_logit_softcapping"};
// Keys of the objects that ConfigLevels looks into.
constexpr std::array<absl::string_view, 4> kNestedKeys = {"text_config", "llm_config",
                                                          "thinker_config", "language_config"};
constexpr std::array<absl::string_view, 4> kHarmlessParts = {"attn", "attention", "router", "gate"};

// Defaults of model classes whose config files may leave the key out: a nested configuration is
// saved without the values that equal the defaults of its class. The values are from Transformers
// 5.23.
struct FamilyDefault {
  absl::string_view model_type;
  absl::string_view key;
  double scale;    // 1: no default
  double softcap;  // 0: no default
};
constexpr std::array<FamilyDefault, 15> kFamilyDefaults = {{
    {"beam", "final_logit_softcapping", 1, 30},
    {"cohere", "logit_scale", 0.0625, 0},
    {"cohere2", "logit_scale", 0.0625, 0},
    {"cohere2_moe", "logit_scale", 0.0625, 0},
    {"gemma2", "final_logit_softcapping", 1, 30},
    {"gemma3n_text", "final_logit_softcapping", 1, 30},
    {"granite_docling_text", "logits_scaling", 0.25, 0},
    {"inkling2_text", "final_logit_softcapping", 1, 30},
    {"mistral_large4_text", "final_logit_softcapping", 1, 30},
    {"muse_glimmer_text", "output_multiplier", 0.19611613513818404, 0},
    {"muse_glimmer_text", "final_logit_softcapping", 1, 20},
    {"muse_spark_text", "output_multiplier", 0.1767766952966369, 0},
    {"muse_spark_text", "final_logit_softcapping", 1, 20},
    {"nanochat", "final_logit_softcapping", 1, 15},
    {"vaultgemma", "final_logit_softcapping", 1, 30},
}};

// The objects of a config in which keys are searched, innermost first.
class ConfigLevels {
 public:
  static absl::StatusOr<ConfigLevels> Of(const Json& top) {
    ConfigLevels levels;
    LOGPROBD_ASSIGN_OR_RETURN(const Json* text, Nested(top, "text_config"));
    if (text == nullptr) {
      LOGPROBD_ASSIGN_OR_RETURN(text, Nested(top, "llm_config"));
    }
    const Json* thinker = nullptr;
    if (text == nullptr) {
      LOGPROBD_ASSIGN_OR_RETURN(thinker, Nested(top, "thinker_config"));
    }
    if (thinker != nullptr) {
      LOGPROBD_ASSIGN_OR_RETURN(text, Nested(*thinker, "text_config"));
    } else if (text == nullptr) {
      LOGPROBD_ASSIGN_OR_RETURN(text, Nested(top, "language_config"));
    }
    for (const Json* level : {text, thinker, &top}) {
      if (level != nullptr) {
        levels.levels_.push_back(level);
      }
    }
    return levels;
  }

  // Returns null if no level has the key, or if its value is null in the innermost level that has
  // it.
  const Json* Find(absl::string_view key) const {
    for (const Json* level : levels_) {
      const auto found = level->find(std::string(key));
      if (found != level->end()) {
        return found->is_null() ? nullptr : &*found;
      }
    }
    return nullptr;
  }

  bool Has(absl::string_view key) const {
    return std::any_of(levels_.begin(), levels_.end(),
                       [key](const Json* level) { return level->contains(std::string(key)); });
  }

  // Returns whether the model or its text part has this type.
  bool IsOfType(absl::string_view model_type) const {
    return std::any_of(levels_.begin(), levels_.end(), [model_type](const Json* level) {
      const auto found = level->find("model_type");
      return found != level->end() && found->is_string() &&
             found->get_ref<const std::string&>() == model_type;
    });
  }

  absl::Span<const Json* const> all() const { return levels_; }

 private:
  static absl::StatusOr<const Json*> Nested(const Json& parent, absl::string_view key) {
    const auto found = parent.find(std::string(key));
    if (found == parent.end() || found->is_null()) {
      return nullptr;
    }
    if (!found->is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(key, " is not an object"));
    }
    return &*found;
  }

  std::vector<const Json*> levels_;
};

absl::Status WrongValue(absl::string_view key, const Json& value, absl::string_view expected) {
  const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return absl::InvalidArgumentError(
      absl::StrCat(key, " is ", PrintableName(text), ", expected ", expected));
}

absl::StatusOr<std::optional<int64_t>> Dimension(const ConfigLevels& levels,
                                                 absl::string_view key) {
  const Json* value = levels.Find(key);
  if (value == nullptr) {
    return std::optional<int64_t>();
  }
  if (!value->is_number_unsigned() || value->get<uint64_t>() == 0 ||
      value->get<uint64_t>() > static_cast<uint64_t>(kDimensionMax)) {
    return WrongValue(key, *value, "an integer from 1 to 2^31");
  }
  return std::optional<int64_t>(value->get<int64_t>());
}

absl::StatusOr<std::optional<bool>> Flag(const ConfigLevels& levels, absl::string_view key) {
  const Json* value = levels.Find(key);
  if (value == nullptr) {
    return std::optional<bool>();
  }
  if (!value->is_boolean()) {
    return WrongValue(key, *value, "true or false");
  }
  return std::optional<bool>(value->get<bool>());
}

// Reads a factor or cap; false counts as null.
absl::StatusOr<std::optional<double>> Factor(const ConfigLevels& levels, absl::string_view key) {
  const Json* value = levels.Find(key);
  if (value == nullptr || (value->is_boolean() && !value->get<bool>())) {
    return std::optional<double>();
  }
  if (!value->is_number()) {
    return WrongValue(key, *value, "a number");
  }
  const double number = value->get<double>();
  if (!std::isfinite(static_cast<float>(number)) || static_cast<float>(number) <= 0.0F) {
    return WrongValue(key, *value, "a positive number that fits fp32");
  }
  return std::optional<double>(number);
}

std::string ModelType(const ConfigLevels& levels) {
  // The outermost type names the model; a nested type only names its text part.
  std::string model_type = "unknown";
  for (const Json* level : levels.all()) {
    const auto found = level->find("model_type");
    if (found != level->end() && found->is_string()) {
      model_type = found->get<std::string>();
    }
  }
  // The type is written to logs and labels, so it is escaped and truncated.
  constexpr size_t kModelTypeBytesMax = 64;
  return absl::CHexEscape(model_type.substr(0, kModelTypeBytesMax));
}

std::string QuantizationMethod(const ConfigLevels& levels) {
  const Json* config = levels.Find("quantization_config");
  if (config == nullptr || !config->is_object()) {
    return "";
  }
  const auto method = config->find("quant_method");
  return method != config->end() && method->is_string() ? method->get<std::string>() : "";
}

absl::Status ResolveScale(const ConfigLevels& levels, HeadConfig& config) {
  std::vector<std::string> used;
  const auto apply = [&](absl::string_view key, double factor) {
    config.scale *= factor;
    used.emplace_back(key);
  };
  for (const absl::string_view key : kMultipliers) {
    const Json* value = levels.Find(key);
    if (value != nullptr && value->is_string() && *value == "inv_sqrt_d_model") {  // MPT
      if (!config.hidden_size.has_value()) {
        return absl::InvalidArgumentError(absl::StrCat(key, " needs d_model, which is missing"));
      }
      apply(key, 1.0 / std::sqrt(static_cast<double>(*config.hidden_size)));
      continue;
    }
    LOGPROBD_ASSIGN_OR_RETURN(const std::optional<double> factor, Factor(levels, key));
    if (factor.has_value()) {
      apply(key, *factor);
    }
  }
  LOGPROBD_ASSIGN_OR_RETURN(const std::optional<double> divisor, Factor(levels, "logits_scaling"));
  if (divisor.has_value()) {  // Granite
    apply("logits_scaling", 1.0 / *divisor);
  }
  LOGPROBD_ASSIGN_OR_RETURN(const std::optional<double> base, Factor(levels, "dim_model_base"));
  if (base.has_value()) {  // MiniCPM divides the hidden state
    if (!config.hidden_size.has_value()) {
      return absl::InvalidArgumentError("dim_model_base needs hidden_size, which is missing");
    }
    apply("dim_model_base", *base / static_cast<double>(*config.hidden_size));
  }
  if (used.size() > 1) {
    config.warnings.push_back(absl::StrCat("several keys of config.json scale the logits (",
                                           absl::StrJoin(used, ", "),
                                           "); their product is used: ", config.scale));
  }
  if (static_cast<float>(config.scale) <= 0.0F ||
      !std::isfinite(static_cast<float>(config.scale))) {
    return absl::InvalidArgumentError(
        absl::StrCat("the scale of the logits is ", config.scale, ", which does not fit fp32"));
  }
  return absl::OkStatus();
}

void ApplyFamilyDefaults(const ConfigLevels& levels, HeadConfig& config) {
  for (const FamilyDefault& family : kFamilyDefaults) {
    if (!levels.IsOfType(family.model_type) || levels.Has(family.key)) {
      continue;
    }
    const bool is_cap = family.softcap > 0;
    (is_cap ? config.softcap : config.scale) = is_cap ? family.softcap : family.scale;
    config.warnings.push_back(absl::StrCat(
        "config.json has no ", family.key, "; the default of model type ", family.model_type,
        " is used: ", is_cap ? "cap " : "scale ", is_cap ? family.softcap : family.scale));
  }
}

bool IsHarmless(absl::string_view key) {
  return std::find(kHarmless.begin(), kHarmless.end(), key) != kHarmless.end() ||
         std::find(kMultipliers.begin(), kMultipliers.end(), key) != kMultipliers.end() ||
         std::any_of(kHarmlessParts.begin(), kHarmlessParts.end(),
                     [key](absl::string_view part) { return absl::StrContains(key, part); });
}

// Returns whether the name of a key suggests that it changes the logits, and it is not understood.
bool IsSuspicious(absl::string_view key) {
  // Removes "warmup", which contains "mup" but has nothing to do with it.
  const std::string lower =
      absl::StrReplaceAll(absl::AsciiStrToLower(key), {{"warmup", ""}, {"warm_up", ""}});
  return !IsHarmless(lower) &&
         (absl::StrContains(lower, "logit") || absl::StrContains(lower, "mup"));
}

// An unknown key may change the logits, so the operator is told that it is ignored.
void WarnOfUnknownKeys(const ConfigLevels& levels, HeadConfig& config) {
  constexpr size_t kWarningsMax = 16;
  for (const Json* level : levels.all()) {
    for (const auto& [key, value] : level->items()) {
      const bool off = value.is_null() || (value.is_boolean() && !value.get<bool>());
      if (off || !IsSuspicious(key) || config.warnings.size() >= kWarningsMax) {
        continue;
      }
      config.warnings.push_back(
          absl::StrCat("config.json has the key ", PrintableName(key),
                       ", which may change the logits and is not understood: it is ignored"));
    }
  }
}

}  // namespace

absl::StatusOr<HeadConfig> ParseHeadConfig(absl::string_view json) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::string strict, StrictJson(json));
  const Json top = Json::parse(strict, nullptr, /*allow_exceptions=*/false);
  if (!top.is_object()) {
    return absl::InvalidArgumentError(top.is_discarded() ? "it is not valid JSON in UTF-8"
                                                         : "it is not a JSON object");
  }
  LOGPROBD_ASSIGN_OR_RETURN(const ConfigLevels levels, ConfigLevels::Of(top));
  HeadConfig config;
  config.model_type = ModelType(levels);
  config.quantization_method = QuantizationMethod(levels);
  for (const absl::string_view key : kHiddenKeys) {
    if (!config.hidden_size.has_value()) {
      LOGPROBD_ASSIGN_OR_RETURN(config.hidden_size, Dimension(levels, key));
    }
  }
  LOGPROBD_ASSIGN_OR_RETURN(config.vocab_size, Dimension(levels, "vocab_size"));
  LOGPROBD_ASSIGN_OR_RETURN(config.tied, Flag(levels, "tie_word_embeddings"));
  LOGPROBD_ASSIGN_OR_RETURN(config.has_bias, Flag(levels, "lm_head_bias"));
  LOGPROBD_RETURN_IF_ERROR(ResolveScale(levels, config));
  if (const Json* softcap = levels.Find("final_logit_softcapping");
      softcap != nullptr && *softcap != 0) {
    LOGPROBD_ASSIGN_OR_RETURN(const std::optional<double> value,
                              Factor(levels, "final_logit_softcapping"));
    config.softcap = value.value_or(0.0);
  }
  ApplyFamilyDefaults(levels, config);
  WarnOfUnknownKeys(levels, config);
  return config;
}

namespace {

// Returns the parts of a level that describe the head. Levels stay levels, so that a key keeps its
// precedence over the same key elsewhere, and the default of a model type applies as before.
Json HeadKeysOf(const Json& level) {
  Json kept = Json::object();
  for (const auto& [key, value] : level.items()) {
    if (std::find(kNestedKeys.begin(), kNestedKeys.end(), key) != kNestedKeys.end()) {
      if (value.is_object()) {
        kept[key] = HeadKeysOf(value);
      }
    } else if (std::find(kHeadKeys.begin(), kHeadKeys.end(), key) != kHeadKeys.end() ||
               std::find(kMultipliers.begin(), kMultipliers.end(), key) != kMultipliers.end() ||
               IsSuspicious(key)) {
      kept[key] = value;
    }
  }
  return kept;
}

}  // namespace

absl::StatusOr<std::string> ConfigOfHead(absl::string_view json, int64_t hidden_size,
                                         int64_t vocab_size) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::string strict, StrictJson(json));
  const Json top = Json::parse(strict, nullptr, /*allow_exceptions=*/false);
  if (!top.is_object()) {
    return absl::InvalidArgumentError("it is not a JSON object");
  }
  Json head = HeadKeysOf(top);
  head["hidden_size"] = hidden_size;
  head["vocab_size"] = vocab_size;
  head["tie_word_embeddings"] = false;
  return absl::StrCat(head.dump(2), "\n");
}

}  // namespace logprobd
