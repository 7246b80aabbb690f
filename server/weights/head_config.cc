#include "server/weights/head_config.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/base/errors.h"
#include "server/weights/head_rules.h"
#include "server/weights/python_json.h"
#include "server/weights/untrusted_text.h"

namespace logprobd {
namespace {

using Json = nlohmann::json;

constexpr int64_t kDimensionMax = int64_t{1} << 31;
constexpr absl::string_view kTieKey = "tie_word_embeddings";
constexpr absl::string_view kModelTypeKey = "model_type";

bool Contains(const std::vector<std::string>& all, absl::string_view wanted) {
  return std::find(all.begin(), all.end(), wanted) != all.end();
}

// Returns the object at `path`, keys separated by dots, or null if a part is missing or null.
absl::StatusOr<const Json*> ObjectAt(const Json& top, absl::string_view path) {
  const Json* object = &top;
  for (const absl::string_view key : absl::StrSplit(path, '.', absl::SkipEmpty())) {
    const auto found = object->find(std::string(key));
    if (found == object->end() || found->is_null()) return nullptr;
    if (!found->is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(key, " is not an object"));
    }
    object = &*found;
  }
  return object;
}

// Returns the model type of a level, or an empty string.
std::string TypeOf(const Json& level) {
  const auto found = level.find(std::string(kModelTypeKey));
  return found != level.end() && found->is_string() ? found->get<std::string>() : "";
}

const TypeRule* RuleOf(const Json& level) { return HeadRules::Get().Find(TypeOf(level)); }

// The objects of a config in which keys are searched, innermost first: the text model, and the
// levels that enclose it.
class ConfigLevels {
 public:
  static absl::StatusOr<ConfigLevels> Of(const Json& top) {
    const TypeRule* const rule = RuleOf(top);
    std::vector<std::string> paths = HeadRules::Get().config_levels;
    if (rule != nullptr && !rule->text_level.empty()) paths = {rule->text_level};
    ConfigLevels levels;
    for (const std::string& path : paths) {
      LOGPROBD_ASSIGN_OR_RETURN(const Json* text, ObjectAt(top, path));
      const auto dot = path.find('.');
      const Json* enclosing = nullptr;
      if (dot != std::string::npos) {
        LOGPROBD_ASSIGN_OR_RETURN(enclosing, ObjectAt(top, path.substr(0, dot)));
      }
      if (text == nullptr && enclosing == nullptr) continue;
      for (const Json* level : {text, enclosing}) {
        if (level != nullptr) {
          levels.levels_.push_back(level);
          levels.names_.push_back(level == text ? path : path.substr(0, dot));
        }
      }
      break;
    }
    levels.levels_.push_back(&top);
    levels.names_.emplace_back("");
    return levels;
  }

  // Returns null if no level has the key, or if its value is null in the innermost level that has
  // it.
  const Json* Find(absl::string_view key) const {
    if (key.empty()) return nullptr;
    for (const Json* level : levels_) {
      const auto found = level->find(std::string(key));
      if (found != level->end()) return found->is_null() ? nullptr : &*found;
    }
    return nullptr;
  }

  bool Has(absl::string_view key) const {
    return !key.empty() && std::any_of(levels_.begin(), levels_.end(), [key](const Json* level) {
      return level->contains(std::string(key));
    });
  }

  const Json& top() const { return *levels_.back(); }
  const std::vector<const Json*>& all() const { return levels_; }
  /// Paths of all(): "text_config", or "" for the top.
  const std::vector<std::string>& names() const { return names_; }

 private:
  std::vector<const Json*> levels_;
  std::vector<std::string> names_;
};

absl::Status WrongValue(absl::string_view key, const Json& value, absl::string_view expected) {
  const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return absl::InvalidArgumentError(
      absl::StrCat(key, " is ", PrintableName(text), ", expected ", expected));
}

absl::StatusOr<std::optional<int64_t>> DimensionOf(absl::string_view key, const Json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() == 0 ||
      value.get<uint64_t>() > static_cast<uint64_t>(kDimensionMax)) {
    return WrongValue(key, value, "an integer from 1 to 2^31");
  }
  return std::optional<int64_t>(value.get<int64_t>());
}

absl::StatusOr<std::optional<int64_t>> Dimension(const ConfigLevels& levels,
                                                 absl::string_view key) {
  const Json* value = levels.Find(key);
  return value == nullptr ? std::optional<int64_t>() : DimensionOf(key, *value);
}

// Returns the width of the head's rows. The innermost level that has any key for it counts.
absl::StatusOr<std::optional<int64_t>> HiddenSize(const ConfigLevels& levels) {
  for (const Json* level : levels.all()) {
    for (const std::string& key : HeadRules::Get().hidden_size_keys) {
      if (const auto found = level->find(key); found != level->end() && !found->is_null()) {
        return DimensionOf(key, *found);
      }
    }
  }
  return std::optional<int64_t>();
}

absl::StatusOr<std::optional<bool>> Flag(const ConfigLevels& levels, absl::string_view key) {
  const Json* value = levels.Find(key);
  if (value == nullptr) return std::optional<bool>();
  if (!value->is_boolean()) return WrongValue(key, *value, "true or false");
  return std::optional<bool>(value->get<bool>());
}

// Reads a factor or cap; false counts as null.
absl::StatusOr<std::optional<double>> Factor(const ConfigLevels& levels, absl::string_view key) {
  const Json* value = levels.Find(key);
  if (value == nullptr || (value->is_boolean() && !value->get<bool>())) {
    return std::optional<double>();
  }
  if (!value->is_number()) return WrongValue(key, *value, "a number");
  const double number = value->get<double>();
  if (!std::isfinite(static_cast<float>(number)) || static_cast<float>(number) <= 0.0F) {
    return WrongValue(key, *value, "a positive number that fits fp32");
  }
  return std::optional<double>(number);
}

std::string ModelType(const ConfigLevels& levels) {
  // The outermost type names the model; a nested type only names its text part.
  std::string model_type;
  for (const Json* level : levels.all()) {
    std::string type = TypeOf(*level);
    if (!type.empty()) model_type = std::move(type);
  }
  // The type is written to logs and labels, so it is escaped and truncated.
  constexpr size_t kModelTypeBytesMax = 64;
  return model_type.empty() ? "unknown"
                            : absl::CHexEscape(model_type.substr(0, kModelTypeBytesMax));
}

std::string QuantizationMethod(const ConfigLevels& levels) {
  const Json* config = levels.Find("quantization_config");
  if (config == nullptr || !config->is_object()) return "";
  const auto method = config->find("quant_method");
  return method != config->end() && method->is_string() ? method->get<std::string>() : "";
}

// The rules that apply to a config: of the model as a whole, or of the text model inside it if that
// computes the logits.
struct AppliedRules {
  const TypeRule* top = nullptr;     ///< That of the whole model's type, or null.
  const TypeRule* text = nullptr;    ///< That of the innermost level's type, or null.
  const TypeRule* outer = nullptr;   ///< Decides about the tie.
  const TypeRule* logits = nullptr;  ///< Decides about scale and cap.
};

AppliedRules RulesOf(const ConfigLevels& levels) {
  AppliedRules applied = {.top = RuleOf(levels.top()), .text = RuleOf(*levels.all().front())};
  for (size_t i = levels.all().size(); i-- > 0;) {
    const TypeRule* const rule = RuleOf(*levels.all()[i]);
    if (rule == nullptr) continue;
    applied.outer = applied.outer == nullptr ? rule : applied.outer;
    applied.logits = rule;
    if (!rule->inner) break;
  }
  return applied;
}

// `rule` and `text` are those of the types of the whole model and of its text model, or null. If
// the first is null, the text model's class tells what is assumed if no level has the flag.
absl::StatusOr<TieFlag> ResolveTie(const ConfigLevels& levels, const TypeRule* rule,
                                   const TypeRule* text) {
  const bool text_ties_by_default =
      text != nullptr &&
      (text->tie == TypeRule::Tie::kTiedByDefault || text->tie == TypeRule::Tie::kAlways);
  // What each level says, innermost first. The text model's class has a default of its own.
  std::vector<std::optional<bool>> flags;
  for (const Json* level : levels.all()) {
    std::optional<bool> flag;
    for (const absl::string_view key :
         {rule == nullptr ? absl::string_view() : rule->tie_key, kTieKey}) {
      const auto found = level->find(std::string(key));
      if (key.empty() || flag.has_value() || found == level->end() || found->is_null()) continue;
      if (!found->is_boolean()) return WrongValue(key, *found, "true or false");
      flag = found->get<bool>();
    }
    flags.push_back(flag);
  }
  TieFlag tie;
  const auto first_stated = [](const std::vector<std::optional<bool>>& all) {
    const auto found = std::find_if(all.begin(), all.end(),
                                    [](std::optional<bool> flag) { return flag.has_value(); });
    return found == all.end() ? std::optional<bool>() : *found;
  };
  const auto says = [&flags](bool value) {
    return std::find(flags.begin(), flags.end(), std::optional<bool>(value)) != flags.end();
  };
  if (rule == nullptr) {
    tie.is_contradictory = says(true) && says(false);
    tie.stated = tie.is_contradictory ? std::optional<bool>() : first_stated(flags);
    if (text != nullptr && !tie.is_contradictory) tie.by_default = text_ties_by_default;
    return tie;
  }
  tie.by_default =
      rule->tie == TypeRule::Tie::kTiedByDefault || rule->tie == TypeRule::Tie::kAlways;
  tie.is_never = rule->tie == TypeRule::Tie::kNever;
  tie.is_always = rule->tie == TypeRule::Tie::kAlways;
  if (rule->tie_any_level) {
    const bool text_ties = text != rule && text_ties_by_default && !flags.front().has_value();
    const bool top_ties = *tie.by_default && !flags.back().has_value();
    tie.by_default = text_ties || top_ties;
    if (says(true)) {
      tie.stated = true;
    } else if (says(false) && !*tie.by_default) {
      tie.stated = false;
    }
    return tie;
  }
  // A file of the text model alone has no such level; then the top counts.
  auto level = std::find(levels.names().begin(), levels.names().end(), rule->tie_level);
  level = level == levels.names().end() ? level - 1 : level;
  const auto index = static_cast<size_t>(level - levels.names().begin());
  tie.stated = flags[index];
  if (!level->empty()) {
    tie.name = absl::StrCat(*level, ".", kTieKey);
    const TypeRule* const of_level = RuleOf(*levels.all()[index]);
    if (of_level != nullptr && of_level != rule) {
      tie.is_always = tie.is_always || of_level->tie == TypeRule::Tie::kAlways;
      tie.by_default = tie.is_always || of_level->tie == TypeRule::Tie::kTiedByDefault;
    }
  }
  if (!tie.stated.has_value()) {
    tie.elsewhere = first_stated(flags);
    // Frameworks that build the text model by its own class find it untied.
    if (!tie.elsewhere.has_value() && text != nullptr && text != rule && !text_ties_by_default) {
      tie.elsewhere = false;
    }
  }
  return tie;
}

// A class that reads a key of its text model gets the default of that model's class.
std::optional<double> DefaultOf(const ConfigLevels& levels, const std::string& key,
                                std::optional<double> own) {
  const TypeRule* const text = RuleOf(*levels.all().front());
  if (text == nullptr || key.empty()) return own;
  if (text->softcap.has_value() && text->softcap->key == key) {
    return text->softcap->default_value.has_value() ? text->softcap->default_value : own;
  }
  for (const ScaleRule& scale : text->scales) {
    if (scale.key == key && scale.default_value.has_value()) return scale.default_value;
  }
  return own;
}

// Returns the factor that a rule stands for, or nullopt if there is none.
absl::StatusOr<std::optional<double>> FactorOf(const ConfigLevels& levels, const ScaleRule& rule,
                                               const HeadConfig& config) {
  const bool is_flag = rule.op == ScaleRule::Op::kInverseSqrtHiddenSize;
  std::optional<double> value;
  if (is_flag) {
    LOGPROBD_ASSIGN_OR_RETURN(
        const std::optional<bool> flag,
        Flag(levels, levels.Has(rule.key) ? absl::string_view(rule.key) : rule.fallback));
    value = flag.has_value() ? std::optional<double>(*flag) : rule.default_value;
  } else {
    LOGPROBD_ASSIGN_OR_RETURN(value, Factor(levels, rule.key));
    if (!levels.Has(rule.key)) value = DefaultOf(levels, rule.key, rule.default_value);
  }
  if (!value.has_value() || (is_flag && *value == 0.0)) return std::optional<double>();
  const bool needs_hidden = is_flag || rule.op == ScaleRule::Op::kOverHiddenSize;
  if (needs_hidden && !config.hidden_size.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(rule.key, " needs hidden_size, which is missing"));
  }
  switch (rule.op) {
    case ScaleRule::Op::kMultiply:
      return value;
    case ScaleRule::Op::kDivide:
      return std::optional<double>(1.0 / *value);
    case ScaleRule::Op::kOverHiddenSize:
      return std::optional<double>(*value / static_cast<double>(*config.hidden_size));
    case ScaleRule::Op::kInverseSqrtHiddenSize:
      return std::optional<double>(1.0 / std::sqrt(static_cast<double>(*config.hidden_size)));
  }
  return std::optional<double>();
}

void WarnOfDefault(absl::string_view key, absl::string_view what, double value,
                   HeadConfig& config) {
  config.warnings.push_back(absl::StrCat("config.json has no ", key,
                                         "; the default of the model's class is used: ", what, " ",
                                         value));
}

absl::Status ResolveScale(const ConfigLevels& levels, const TypeRule& rule,
                          const LogitOverrides& overrides, HeadConfig& config) {
  const bool has_key = std::any_of(rule.scales.begin(), rule.scales.end(), [&](const auto& scale) {
    return levels.Has(scale.key) || Contains(overrides.ignored_keys, scale.key);
  });
  if (rule.needs_key && !has_key) {
    return absl::UnimplementedError(absl::StrCat(
        "models of type ", config.model_type, " scale their logits by ",
        absl::StrJoin(
            rule.scales, " or ",
            [](std::string* out, const ScaleRule& scale) { absl::StrAppend(out, scale.key); }),
        ", which config.json lacks; set --logit-scale"));
  }
  for (const ScaleRule& scale : rule.scales) {
    if (Contains(overrides.ignored_keys, scale.key)) continue;
    LOGPROBD_ASSIGN_OR_RETURN(const std::optional<double> factor, FactorOf(levels, scale, config));
    if (!factor.has_value()) continue;
    config.scale *= *factor;
    if (scale.key.empty() && config.tied.stated == std::optional<bool>(false)) {
      config.warnings.push_back(absl::StrCat("transformers ", HeadRules::Get().transformers_version,
                                             " scales the logits of ", config.model_type, " by ",
                                             *factor,
                                             " although tie_word_embeddings is false, and older "
                                             "releases do not: --logit-scale 1 follows those"));
    }
    const bool is_stated = levels.Has(scale.key) || levels.Has(scale.fallback);
    const bool is_flag = scale.op == ScaleRule::Op::kInverseSqrtHiddenSize;
    if (!is_stated && !is_flag && *factor != 1.0) {  // a flag that is not set is the norm
      WarnOfDefault(scale.key, "scale", *factor, config);
    }
  }
  if (static_cast<float>(config.scale) <= 0.0F ||
      !std::isfinite(static_cast<float>(config.scale))) {
    return absl::InvalidArgumentError(
        absl::StrCat("the scale of the logits is ", config.scale, ", which does not fit fp32"));
  }
  return absl::OkStatus();
}

absl::Status ResolveSoftcap(const ConfigLevels& levels, const TypeRule& rule,
                            const LogitOverrides& overrides, HeadConfig& config) {
  if (!rule.softcap.has_value() || Contains(overrides.ignored_keys, rule.softcap->key)) {
    return absl::OkStatus();
  }
  const std::string& key = rule.softcap->key;
  if (!levels.Has(key)) {
    config.softcap = DefaultOf(levels, key, rule.softcap->default_value).value_or(0.0);
    if (config.softcap > 0) WarnOfDefault(key, "cap", config.softcap, config);
    return absl::OkStatus();
  }
  if (const Json* value = levels.Find(key); value != nullptr && *value != 0) {
    LOGPROBD_ASSIGN_OR_RETURN(const std::optional<double> softcap, Factor(levels, key));
    config.softcap = softcap.value_or(0.0);
  }
  return absl::OkStatus();
}

// The text model inside a known model may transform its own logits, which the class of the whole
// model then must do, too. Implementations disagree where it does not.
absl::Status CheckTextModel(const ConfigLevels& levels, const AppliedRules& applied,
                            const LogitOverrides& overrides, const HeadConfig& config) {
  const TypeRule* const text = applied.text;
  if (text == nullptr || text == applied.logits) return absl::OkStatus();
  struct Key {
    std::string name;
    std::optional<double> by_default;
    double neutral;
  };
  std::vector<Key> keys;
  for (const ScaleRule& scale : text->scales) {
    if (scale.op != ScaleRule::Op::kInverseSqrtHiddenSize) {
      keys.push_back({scale.key, scale.default_value, 1.0});
    }
  }
  if (text->softcap.has_value()) {
    keys.push_back({text->softcap->key, text->softcap->default_value, 0.0});
  }
  for (const auto& [key, by_default, neutral] : keys) {
    if (applied.logits->Transforms(key) || Contains(overrides.ignored_keys, key)) continue;
    std::optional<double> value = by_default;
    if (const Json* found = levels.Find(key); levels.Has(key)) {
      value = neutral;
      if (found != nullptr && *found != 0) {
        LOGPROBD_ASSIGN_OR_RETURN(const std::optional<double> factor, Factor(levels, key));
        value = factor.value_or(neutral);
      }
    }
    if (value.has_value() && *value != neutral) {
      return absl::UnimplementedError(absl::StrCat(
          "the text model, ", TypeOf(*levels.all().front()), ", changes its logits by ", key, " (",
          *value, "), but transformers ", HeadRules::Get().transformers_version,
          " ignores that inside ", config.model_type,
          ", and vLLM builds the text model by its own class; say which is right: set --softcap "
          "(0: no cap) or --logit-scale (1: no factor), and --ignore-config-key ",
          key));
    }
  }
  return absl::OkStatus();
}

// Returns whether a value leaves a setting off.
bool IsOff(const Json& value) {
  return value.is_null() || (value.is_boolean() && !value.get<bool>()) || value == 0 ||
         (value.is_structured() && value.empty()) || value == "";
}

// Adds to `found` the keys that may change the logits and are not understood, "name (value)", at
// any level of the config that can describe the text model. `understood` are the rules whose keys
// are accounted for.
void AddUnknownKeys(const Json& level, const std::vector<const TypeRule*>& understood,
                    const LogitOverrides& overrides, std::map<std::string, std::string>& found) {
  const HeadRules& rules = HeadRules::Get();
  for (const auto& item : level.items()) {
    const std::string& key = item.key();
    const Json& value = item.value();
    // A list has its places as keys.
    if (IsOff(value) || (level.is_object() && Contains(overrides.ignored_keys, key))) continue;
    const bool is_known =
        std::any_of(understood.begin(), understood.end(), [&key](const TypeRule* rule) {
          return rule->Transforms(key) || Contains(rule->no_effect, key);
        });
    if (level.is_object() && rules.MayChangeLogits(key)) {
      if (!is_known) {
        constexpr size_t kValueBytesMax = 64;
        found[key] = PrintableName(value.dump().substr(0, kValueBytesMax));
      }
    } else if (value.is_structured() && !rules.IsOtherLevel(key)) {
      AddUnknownKeys(value, understood, overrides, found);
    }
  }
}

absl::Status RefuseUnknownKeys(const Json& top, const std::vector<const TypeRule*>& understood,
                               const LogitOverrides& overrides, const HeadConfig& config) {
  std::map<std::string, std::string> found;
  AddUnknownKeys(top, understood, overrides, found);
  if (found.empty()) return absl::OkStatus();
  // The list is the user's to copy, so it is whole unless there are very many keys.
  constexpr size_t kKeysMax = 32;
  std::vector<std::string> names;
  std::vector<std::string> described;
  for (const auto& [key, value] : found) {
    if (names.size() < kKeysMax) {
      names.push_back(PrintableName(key));
      described.push_back(absl::StrCat(names.back(), " (", value, ")"));
      names.back() = names.back().substr(1, names.back().rfind('\'') - 1);
    }
  }
  return absl::UnimplementedError(absl::StrCat(
      "config.json has the key", found.size() == 1 ? " " : "s ", absl::StrJoin(described, ", "),
      found.size() > kKeysMax ? absl::StrCat(" and ", found.size() - kKeysMax, " more") : "",
      ", which may change the logits and ", found.size() == 1 ? "is" : "are",
      " not understood for model type ", config.model_type, "; set --ignore-config-key '",
      absl::StrJoin(names, ":"),
      "', together with --softcap for a cap or --logit-scale for a factor, if the logits are "
      "otherwise a plain product"));
}

// `type` is that of `rule`, which may be the text model's.
absl::Status RefuseType(const TypeRule& rule, const std::string& type, const HeadConfig& config) {
  const bool is_plain = std::find(rule.plain_vocab.begin(), rule.plain_vocab.end(),
                                  config.vocab_size.value_or(0)) != rule.plain_vocab.end();
  if (rule.refused.empty() || is_plain) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      "models of type ", type, " are not served: ", rule.refused,
      "; to serve the folder as the plain head of some other model, set --ignore-config-key "
      "model_type"));
}

// A model inside one of an unknown type, at a level that is none of levels(), may be the text
// model.
absl::Status RefuseUnknownLevels(const Json& level, const ConfigLevels& levels) {
  const HeadRules& rules = HeadRules::Get();
  for (const auto& [key, value] : level.items()) {
    if (!value.is_object() || rules.IsOtherLevel(key)) continue;
    const bool is_searched =
        std::find(levels.all().begin(), levels.all().end(), &value) != levels.all().end();
    const TypeRule* const rule = is_searched ? nullptr : RuleOf(value);
    if (rule != nullptr &&
        (!rule->scales.empty() || rule->softcap.has_value() || !rule->refused.empty())) {
      return absl::UnimplementedError(absl::StrCat(
          "config.json describes a model of type ", TypeOf(value), " at ", PrintableName(key),
          ", a level that is not known; if it is the text model, which then transforms the logits, "
          "move it to text_config, and otherwise set --ignore-config-key model_type, with "
          "--logit-scale and --softcap if needed"));
    }
    LOGPROBD_RETURN_IF_ERROR(RefuseUnknownLevels(value, levels));
  }
  return absl::OkStatus();
}

// Returns why the type of the model, or of the text model that makes its logits, is not known, or
// an empty string.
std::string WhatIsNotKnown(const ConfigLevels& levels, const AppliedRules& applied,
                           const HeadConfig& config) {
  const std::string text_type = TypeOf(*levels.all().front());
  if (applied.top == nullptr) {
    return absl::StrCat(
        TypeOf(levels.top()).empty()
            ? std::string("config.json has no model_type: ")
            : absl::StrCat("model type ", config.model_type, " is not known: "),
        applied.logits == nullptr
            ? std::string("the head is served as a plain one, without scale and cap")
            : absl::StrCat("its text model, ", text_type, ", decides about the logits"));
  }
  if (applied.logits->inner) {
    return absl::StrCat("the text model of ", config.model_type, ", ",
                        text_type.empty() ? "which states no model_type" : PrintableName(text_type),
                        ", is not known: the head is served as a plain one");
  }
  return "";
}

absl::Status ResolveLogits(const ConfigLevels& levels, const LogitOverrides& overrides,
                           HeadConfig& config) {
  AppliedRules applied = RulesOf(levels);
  if (Contains(overrides.ignored_keys, kModelTypeKey)) {
    applied = {};
  } else if (std::string unknown = WhatIsNotKnown(levels, applied, config); !unknown.empty()) {
    if (overrides.strict) {
      return absl::UnimplementedError(
          absl::StrCat(unknown, "; --strict-config refuses what is not known"));
    }
    if (applied.top == nullptr) {
      LOGPROBD_RETURN_IF_ERROR(RefuseUnknownLevels(levels.top(), levels));
    }
    config.warnings.push_back(std::move(unknown));
  }
  config.rule = applied.outer;
  LOGPROBD_ASSIGN_OR_RETURN(config.tied, ResolveTie(levels, applied.top, applied.text));
  std::vector<const TypeRule*> understood;
  if (applied.logits != nullptr) {
    understood = {applied.outer, applied.logits};
    for (const Json* level : levels.all()) {
      if (const TypeRule* const rule = RuleOf(*level); rule != nullptr) {
        LOGPROBD_RETURN_IF_ERROR(RefuseType(*rule, TypeOf(*level), config));
      }
    }
    if (applied.text != nullptr) understood.push_back(applied.text);
    LOGPROBD_RETURN_IF_ERROR(CheckTextModel(levels, applied, overrides, config));
  }
  LOGPROBD_RETURN_IF_ERROR(RefuseUnknownKeys(levels.top(), understood, overrides, config));
  if (applied.logits != nullptr && !overrides.scale.has_value()) {
    LOGPROBD_RETURN_IF_ERROR(ResolveScale(levels, *applied.logits, overrides, config));
  }
  if (applied.logits != nullptr && !overrides.softcap.has_value()) {
    LOGPROBD_RETURN_IF_ERROR(ResolveSoftcap(levels, *applied.logits, overrides, config));
  }
  config.scale = overrides.scale.value_or(config.scale);
  config.softcap = overrides.softcap.value_or(config.softcap);
  return absl::OkStatus();
}

// Replaces vocab_size by the number of ids of a type that has a key of its own for it.
absl::Status ResolveVocab(const ConfigLevels& levels, HeadConfig& config) {
  if (config.rule == nullptr || config.rule->vocab_key.empty()) return absl::OkStatus();
  const std::string& unless = config.rule->vocab_unless;
  LOGPROBD_ASSIGN_OR_RETURN(const std::optional<bool> flag, Flag(levels, unless));
  if (!unless.empty() && flag.value_or(true)) return absl::OkStatus();
  LOGPROBD_ASSIGN_OR_RETURN(const std::optional<int64_t> ids,
                            Dimension(levels, config.rule->vocab_key));
  if (ids.has_value()) {
    config.vocab_size = ids;
  } else if (const auto& by_default = config.rule->vocab_default;
             by_default.has_value() && !levels.Has(config.rule->vocab_key)) {
    config.vocab_size = std::min(*by_default, config.vocab_size.value_or(*by_default));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<HeadConfig> ParseHeadConfig(absl::string_view json,
                                           const LogitOverrides& overrides) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::string strict, StrictJson(json));
  const Json top = Json::parse(strict, nullptr, /*allow_exceptions=*/false);
  if (!top.is_object()) {
    return absl::InvalidArgumentError(
        top.is_discarded() ? "it is not valid JSON in UTF-8, or a number is too large"
                           : "it is not a JSON object");
  }
  LOGPROBD_ASSIGN_OR_RETURN(const ConfigLevels levels, ConfigLevels::Of(top));
  HeadConfig config;
  if (!Contains(overrides.ignored_keys, kModelTypeKey)) config.model_type = ModelType(levels);
  config.quantization_method = QuantizationMethod(levels);
  config.ignored_names = overrides.ignored_keys;
  LOGPROBD_ASSIGN_OR_RETURN(config.hidden_size, HiddenSize(levels));
  LOGPROBD_ASSIGN_OR_RETURN(config.vocab_size, Dimension(levels, "vocab_size"));
  LOGPROBD_ASSIGN_OR_RETURN(config.has_bias, Flag(levels, "lm_head_bias"));
  LOGPROBD_RETURN_IF_ERROR(ResolveLogits(levels, overrides, config));
  LOGPROBD_RETURN_IF_ERROR(ResolveVocab(levels, config));
  return config;
}

namespace {

// Returns whether a key scales or caps the logits of some type, or says how many ids are valid.
bool IsTransformKey(absl::string_view key) {
  static const auto* const keys = [] {
    auto* all = new absl::flat_hash_set<std::string>;
    for (const auto& [type, rule] : HeadRules::Get().types) {
      for (const ScaleRule& scale : rule.scales) {
        if (!scale.key.empty() && scale.key != kTieKey) all->insert(scale.key);
      }
      if (!rule.vocab_key.empty()) all->insert(rule.vocab_key);
      if (rule.softcap.has_value()) all->insert(rule.softcap->key);
    }
    return all;
  }();
  return keys->contains(key);
}

// Returns whether a key is a flag that scales the logits of some type.
bool IsScaleFlag(absl::string_view key) {
  const auto& types = HeadRules::Get().types;
  return std::any_of(types.begin(), types.end(), [key](const auto& type) {
    const std::vector<ScaleRule>& scales = type.second.scales;
    return std::any_of(scales.begin(), scales.end(), [key](const ScaleRule& scale) {
      return scale.op == ScaleRule::Op::kInverseSqrtHiddenSize && !key.empty() && scale.key == key;
    });
  });
}

bool IsKeptKey(absl::string_view key) {
  return key == "architectures" || key == kModelTypeKey || key == "lm_head_bias" ||
         IsTransformKey(key);
}

bool IsConfigLevel(absl::string_view key) {
  const std::vector<std::string>& paths = HeadRules::Get().config_levels;
  return std::any_of(paths.begin(), paths.end(), [key](const std::string& path) {
    return path == key || absl::StartsWith(path, absl::StrCat(key, "."));
  });
}

// Returns the parts of a level that describe the head. Levels stay levels, so that a key keeps its
// precedence over the same key elsewhere, and the default of a model type applies as before.
Json HeadKeysOf(const Json& level, const std::vector<std::string>& ignored_keys) {
  const HeadRules& rules = HeadRules::Get();
  Json kept = Json::object();
  for (const auto& [key, value] : level.items()) {
    if (Contains(ignored_keys, key)) continue;
    if (value.is_object() && !rules.MayChangeLogits(key)) {
      Json inner = rules.IsOtherLevel(key) ? Json() : HeadKeysOf(value, ignored_keys);
      // An empty level hides others in which keys would be searched instead.
      if (!inner.empty() || IsConfigLevel(key)) {
        kept[key] = inner.is_null() ? Json::object() : std::move(inner);
      }
    } else if (IsKeptKey(key) || rules.MayChangeLogits(key)) {
      kept[key] = value;
    }
  }
  return kept;
}

// Returns whether the flag of tied weights also scales the logits, as in T5.
bool TieScalesLogits(const Json& top) {
  const TypeRule* const rule = RuleOf(top);
  return rule != nullptr && rule->Transforms(kTieKey);
}

}  // namespace

absl::StatusOr<std::string> ConfigOfHead(absl::string_view json, int64_t hidden_size,
                                         int64_t vocab_size,
                                         const std::vector<std::string>& ignored_keys) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::string strict, StrictJson(json));
  const Json top = Json::parse(strict, nullptr, /*allow_exceptions=*/false);
  if (!top.is_object()) return absl::InvalidArgumentError("it is not a JSON object");
  Json head = HeadKeysOf(top, ignored_keys);
  // A class has a default for a key that is missing, and none for null; a flag is off if it is
  // false.
  for (const std::string& key : ignored_keys) {
    if (IsScaleFlag(key)) {
      head[key] = false;
    } else if (IsTransformKey(key)) {
      head[key] = nullptr;
    }
  }
  head["hidden_size"] = hidden_size;
  head["vocab_size"] = vocab_size;
  if (!TieScalesLogits(top)) {
    head[std::string(kTieKey)] = false;
  } else if (top.contains(std::string(kTieKey)) && !Contains(ignored_keys, kTieKey)) {
    head[std::string(kTieKey)] = top.at(std::string(kTieKey));
  }
  return absl::StrCat(head.dump(2), "\n");
}

}  // namespace logprobd
