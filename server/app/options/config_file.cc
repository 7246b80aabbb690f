#include "server/app/options/config_file.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/app/options/toml_file.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

absl::string_view TypeName(toml::value_t type) {
  switch (type) {
    case toml::value_t::boolean:
      return "true or false";
    case toml::value_t::integer:
      return "a whole number";
    case toml::value_t::floating:
      return "a number with a decimal point";
    case toml::value_t::string:
      return "a string";
    case toml::value_t::array:
      return "an array";
    case toml::value_t::table:
      return "a table";
    default:
      return "a date or time";
  }
}

/// Returns whether a flag of this kind accepts a value of this type. It does not apply to values
/// for one head.
bool TypeFits(Flag::Kind kind, toml::value_t type) {
  switch (kind) {
    case Flag::Kind::kText:
    case Flag::Kind::kChoice:
    case Flag::Kind::kAddress:
      return type == toml::value_t::string;
    case Flag::Kind::kSwitch:
      return type == toml::value_t::boolean;
    case Flag::Kind::kInteger:
      return type == toml::value_t::integer;
    case Flag::Kind::kBytes:
    case Flag::Kind::kCount:
    case Flag::Kind::kGpus:
      return type == toml::value_t::integer || type == toml::value_t::string;
    case Flag::Kind::kNumber:
      return type == toml::value_t::integer || type == toml::value_t::floating;
  }
  return false;
}

absl::string_view ExpectedType(Flag::Kind kind) {
  switch (kind) {
    case Flag::Kind::kText:
    case Flag::Kind::kChoice:
    case Flag::Kind::kAddress:
      return "a string";
    case Flag::Kind::kSwitch:
      return "true or false";
    case Flag::Kind::kInteger:
      return "a whole number";
    case Flag::Kind::kBytes:
      return "a whole number or a string such as \"64MiB\"";
    case Flag::Kind::kCount:
      return "a whole number or \"auto\"";
    case Flag::Kind::kGpus:
      return "a string such as \"0,1\" or \"auto\"";
    case Flag::Kind::kNumber:
      return "a number";
  }
  return "";
}

std::string TextOf(const toml::value& value) {
  switch (value.type()) {
    case toml::value_t::boolean:
      return value.as_boolean() ? "true" : "false";
    case toml::value_t::integer:
      return absl::StrCat(value.as_integer());
    case toml::value_t::floating:
      return NumberText(value.as_floating());
    default:
      return value.as_string().str;
  }
}

bool IsTextOfHeads(const Flag& flag, const toml::value& value) {
  return value.is_string() && !SplitByHead(flag, TextOf(value)).front().head.empty();
}

/// Returns the text of the flag's value, or the texts of an array. Returns an empty vector if a
/// type is wrong.
std::vector<std::string> TextsOf(const Flag& flag, const toml::value& value) {
  if (TypeFits(flag.kind, value.type()) || (flag.is_of_head && IsTextOfHeads(flag, value))) {
    return {TextOf(value)};
  }
  std::vector<std::string> texts;
  if (flag.is_of_head && value.is_array()) {
    for (const toml::value& item : value.as_array()) {
      if (!item.is_string()) return {};
      texts.push_back(TextOf(item));
    }
  }
  return texts;
}

absl::StatusOr<Setting> SettingOf(const std::string& path, const std::string& key,
                                  const toml::value& value) {
  const std::string prefix = absl::StrCat("configuration file ", path, ": key ", OneLine(key));
  const Flag* const flag = FindFlag(key);
  if (flag == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(prefix, " is unknown; the nearest is ", NearestFlag(key)));
  }
  if (flag->command_line_only || flag->name == "config") {
    return absl::InvalidArgumentError(
        absl::StrCat(prefix, ": --", flag->name, " cannot be set in a file"));
  }
  std::vector<std::string> texts = TextsOf(*flag, value);
  if (texts.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        prefix, " is ", TypeName(value.type()), ", but must be ", ExpectedType(flag->kind),
        flag->is_of_head ? ", or an array of strings such as \"NAME=VALUE\"" : ""));
  }
  return Setting{flag, std::move(texts), absl::StrCat(key, " in ", path)};
}

}  // namespace

absl::StatusOr<std::vector<Setting>> ReadConfigFile(const std::string& path) {
  LOGPROBD_ASSIGN_OR_RETURN(const toml::value file, ParseTomlFile("configuration file", path));
  // The map sorts the keys, so that a file with several errors always reports the same one.
  const std::map<std::string, toml::value> entries(file.as_table().begin(), file.as_table().end());
  std::vector<Setting> settings;
  for (const auto& [key, value] : entries) {
    LOGPROBD_ASSIGN_OR_RETURN(Setting setting, SettingOf(path, key, value));
    for (const Setting& other : settings) {
      if (other.flag == setting.flag) {
        return absl::InvalidArgumentError(
            absl::StrCat("configuration file ", path, ": ", setting.flag->name, " is set twice"));
      }
    }
    settings.push_back(std::move(setting));
  }
  return settings;
}

}  // namespace logprobd
