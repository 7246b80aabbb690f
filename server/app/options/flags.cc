#include "server/app/options/flags.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace logprobd {
namespace {

constexpr absl::string_view kAuto = "auto";
constexpr absl::string_view kModel = "model";
/// Maximum number of bytes of a value that an error message repeats.
constexpr size_t kTextBytesShown = 100;

std::string WithDashes(absl::string_view name) { return absl::StrReplaceAll(name, {{"_", "-"}}); }

/// Returns the smallest number of letters to insert, delete or replace to turn `a` into `b`.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row.back();
}

std::string RangeText(const Flag& flag) {
  if (flag.kind == Flag::Kind::kBytes) {
    return absl::StrCat("must be a number of bytes, such as 64MiB or 67108864, from ",
                        BytesText(static_cast<int64_t>(flag.min)), " to ",
                        BytesText(static_cast<int64_t>(flag.max)));
  }
  return absl::StrCat("must be ", flag.kind == Flag::Kind::kCount ? "auto or " : "",
                      flag.kind == Flag::Kind::kNumber ? "a number" : "a whole number", " from ",
                      NumberText(flag.min), " to ", NumberText(flag.max));
}

std::optional<int64_t> ParseInteger(absl::string_view text) {
  int64_t value = 0;
  if (absl::StartsWith(text, "+") || !absl::SimpleAtoi(text, &value)) return std::nullopt;
  return value;
}

std::optional<int64_t> ParseBytes(absl::string_view text) {
  int shift = 0;
  if (absl::ConsumeSuffix(&text, "KiB")) {
    shift = 10;
  } else if (absl::ConsumeSuffix(&text, "MiB")) {
    shift = 20;
  } else if (absl::ConsumeSuffix(&text, "GiB")) {
    shift = 30;
  }
  const absl::string_view digits = absl::StripAsciiWhitespace(text);
  constexpr int64_t kLargest = int64_t{1} << 62;
  const std::optional<int64_t> value = ParseInteger(digits);
  if (!value.has_value() || *value > (kLargest >> shift) || *value < -kLargest) return std::nullopt;
  return *value < 0 ? *value : *value << shift;
}

absl::Status SetNumber(const Flag& flag, absl::string_view text, ServerOptions& options) {
  absl::Status error = absl::InvalidArgumentError(RangeText(flag));
  if (flag.kind == Flag::Kind::kNumber) {
    double value = 0;
    if (!absl::SimpleAtod(text, &value) || !(value >= flag.min && value <= flag.max)) return error;
    options.*std::get<double ServerOptions::*>(flag.member) = value;
    return absl::OkStatus();
  }
  int64_t ServerOptions::*const member = std::get<int64_t ServerOptions::*>(flag.member);
  if (flag.kind == Flag::Kind::kCount && text == kAuto) {
    options.*member = 0;
    return absl::OkStatus();
  }
  const std::optional<int64_t> value =
      flag.kind == Flag::Kind::kBytes ? ParseBytes(text) : ParseInteger(text);
  if (!value.has_value() || *value < static_cast<int64_t>(flag.min) ||
      *value > static_cast<int64_t>(flag.max)) {
    return error;
  }
  options.*member = *value;
  return absl::OkStatus();
}

absl::Status SetGpus(const Flag& flag, absl::string_view text, ServerOptions& options) {
  std::vector<int32_t> gpus;
  if (text != kAuto) {
    for (const absl::string_view item : absl::StrSplit(text, ',')) {
      const std::optional<int64_t> gpu = ParseInteger(absl::StripAsciiWhitespace(item));
      if (!gpu.has_value() || *gpu < static_cast<int64_t>(flag.min) ||
          *gpu > static_cast<int64_t>(flag.max)) {
        return absl::InvalidArgumentError(
            absl::StrCat("must be auto or a comma-separated list of GPU numbers such as 0,1; \"",
                         item.substr(0, 20), "\" is not a number from ", NumberText(flag.min),
                         " to ", NumberText(flag.max)));
      }
      if (absl::c_linear_search(gpus, *gpu)) {
        return absl::InvalidArgumentError(absl::StrCat("must not name GPU ", *gpu, " twice"));
      }
      gpus.push_back(static_cast<int32_t>(*gpu));
    }
  }
  options.*std::get<std::vector<int32_t> ServerOptions::*>(flag.member) = std::move(gpus);
  return absl::OkStatus();
}

absl::Status SetSwitch(const Flag& flag, absl::string_view text, ServerOptions& options) {
  const bool is_true = text == "true" || text == "1";
  if (!is_true && text != "false" && text != "0") {
    return absl::InvalidArgumentError("must be true or false");
  }
  options.*std::get<bool ServerOptions::*>(flag.member) = is_true;
  return absl::OkStatus();
}

absl::Status SetChoice(const Flag& flag, absl::string_view text, ServerOptions& options) {
  const auto choice = absl::c_find_if(
      flag.choices, [text](const Flag::Choice& candidate) { return candidate.text == text; });
  if (choice == flag.choices.end()) {
    return absl::InvalidArgumentError(absl::StrCat("must be one of: ", ChoicesText(flag)));
  }
  std::visit(
      [&](auto value) { options.*std::get<decltype(value) ServerOptions::*>(flag.member) = value; },
      choice->value);
  return absl::OkStatus();
}

absl::Status SetText(const Flag& flag, absl::string_view text, ServerOptions& options) {
  if (text.find('\0') != absl::string_view::npos) {
    return absl::InvalidArgumentError("must not contain a NUL byte");
  }
  const bool is_off = flag.kind == Flag::Kind::kAddress && text == "none";
  options.*std::get<std::string ServerOptions::*>(flag.member) = is_off ? "" : std::string(text);
  return absl::OkStatus();
}

std::string TomlString(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (byte < 0x20 || byte == 0x7F) {
      constexpr absl::string_view kHex = "0123456789ABCDEF";
      out += absl::StrCat("\\u00", kHex.substr(byte >> 4, 1), kHex.substr(byte & 15, 1));
    } else {
      out.push_back(c);
    }
  }
  return out + "\"";
}

/// Returns the index of the value in a text that begins with NAME=, or nothing for any other text.
std::optional<size_t> ValueBegin(absl::string_view text) {
  const size_t end = text.find_first_of("=/,");
  if (end == absl::string_view::npos || text[end] != '=' ||
      absl::StripAsciiWhitespace(text.substr(0, end)).empty()) {
    return std::nullopt;
  }
  return end + 1;
}

/// Returns the length of the first value, which ends at a comma that is followed by NAME=.
size_t FirstLength(absl::string_view text) {
  for (size_t comma = text.find(','); comma != absl::string_view::npos;
       comma = text.find(',', comma + 1)) {
    if (ValueBegin(text.substr(comma + 1)).has_value()) return comma;
  }
  return text.size();
}

/// Returns the value that applies to all heads without a value of their own.
std::string CommonValueAsToml(const Flag& flag, const ServerOptions& options) {
  if (const auto* text = std::get_if<std::string ServerOptions::*>(&flag.member)) {
    const std::string& value = options.**text;
    return TomlString(value.empty() && flag.kind == Flag::Kind::kAddress ? "none" : value);
  }
  if (const auto* is_on = std::get_if<bool ServerOptions::*>(&flag.member)) {
    return options.**is_on ? "true" : "false";
  }
  if (const auto* number = std::get_if<double ServerOptions::*>(&flag.member)) {
    return NumberText(options.**number);
  }
  if (const auto* gpus = std::get_if<std::vector<int32_t> ServerOptions::*>(&flag.member)) {
    const std::vector<int32_t>& value = options.**gpus;
    return TomlString(value.empty() ? kAuto : absl::StrJoin(value, ","));
  }
  if (flag.kind == Flag::Kind::kChoice) return TomlString(ChoiceText(flag, options));
  const int64_t value = options.*std::get<int64_t ServerOptions::*>(flag.member);
  if (flag.kind == Flag::Kind::kCount && value == 0) return TomlString(kAuto);
  const std::string text = flag.kind == Flag::Kind::kBytes ? BytesText(value) : absl::StrCat(value);
  return std::isdigit(static_cast<unsigned char>(text.back())) != 0 ? text : TomlString(text);
}

}  // namespace

const Flag* FindFlag(absl::string_view name) {
  const std::string dashed = WithDashes(name);
  for (const Flag& flag : Flags()) {
    if (flag.name == dashed) return &flag;
  }
  return nullptr;
}

std::string NearestFlag(absl::string_view name) {
  // A long name is truncated, because the time to compute the distance grows with its length.
  const std::string dashed = absl::AsciiStrToLower(WithDashes(name.substr(0, 64)));
  const auto flags = Flags();
  const auto* const nearest =
      std::min_element(flags.begin(), flags.end(), [&dashed](const Flag& a, const Flag& b) {
        return EditDistance(dashed, a.name) < EditDistance(dashed, b.name);
      });
  return std::string(nearest->name);
}

absl::Status SetFlag(const Flag& flag, absl::string_view text, ServerOptions& options) {
  switch (flag.kind) {
    case Flag::Kind::kText:
    case Flag::Kind::kAddress:
      return SetText(flag, text, options);
    case Flag::Kind::kChoice:
      return SetChoice(flag, text, options);
    case Flag::Kind::kSwitch:
      return SetSwitch(flag, text, options);
    case Flag::Kind::kInteger:
    case Flag::Kind::kCount:
    case Flag::Kind::kBytes:
    case Flag::Kind::kNumber:
      return SetNumber(flag, text, options);
    case Flag::Kind::kGpus:
      return SetGpus(flag, text, options);
  }
  return absl::InternalError("unknown kind of flag");
}

std::vector<HeadText> SplitByHead(const Flag& flag, absl::string_view text) {
  if (!flag.is_of_head || (flag.name == kModel && !ValueBegin(text).has_value())) {
    return {{"", std::string(text)}};
  }
  std::vector<HeadText> parts;
  for (bool is_last = false; !is_last;) {
    const size_t length = FirstLength(text);
    const absl::string_view part = text.substr(0, length);
    is_last = length == text.size();
    text.remove_prefix(is_last ? length : length + 1);
    const size_t begin = ValueBegin(part).value_or(0);
    const absl::string_view head = part.substr(0, begin == 0 ? 0 : begin - 1);
    parts.push_back(
        {std::string(absl::StripAsciiWhitespace(head)), std::string(part.substr(begin))});
  }
  return parts;
}

absl::Status SetFlagFromSource(const Flag& flag, absl::Span<const std::string> texts,
                               ServerOptions& options) {
  // A source replaces every value from sources of lower precedence, including values of single
  // heads.
  const ServerOptions defaults;
  std::visit([&](auto member) { options.*member = defaults.*member; }, flag.member);
  std::erase_if(options.head_values,
                [&flag](const HeadValue& value) { return value.flag == flag.name; });
  bool has_plain = false;
  for (const std::string& text : texts) {
    for (HeadText& part : SplitByHead(flag, text)) {
      const bool is_plain = part.head.empty();
      const std::string for_head = is_plain ? "" : absl::StrCat(" for head \"", part.head, "\"");
      const auto is_same = [&](const HeadValue& value) {
        return value.flag == flag.name && value.head == part.head;
      };
      if (is_plain ? has_plain : absl::c_any_of(options.head_values, is_same)) {
        return absl::InvalidArgumentError(
            absl::StrCat("is given twice", is_plain ? " without a head's name" : for_head));
      }
      ServerOptions scratch;
      const absl::Status status = SetFlag(flag, part.text, is_plain ? options : scratch);
      if (!status.ok()) {
        return absl::InvalidArgumentError(absl::StrCat("is \"",
                                                       part.text.substr(0, kTextBytesShown), "\"",
                                                       for_head, ": it ", status.message()));
      }
      if (is_plain) {
        has_plain = true;
      } else {
        options.head_values.push_back({flag.name, std::move(part.head), std::move(part.text)});
      }
    }
  }
  return absl::OkStatus();
}

std::string ChoicesText(const Flag& flag) {
  return absl::StrJoin(flag.choices, ", ", [](std::string* out, const Flag::Choice& choice) {
    absl::StrAppend(out, choice.text);
  });
}

absl::string_view ChoiceText(const Flag& flag, const ServerOptions& options) {
  for (const Flag::Choice& choice : flag.choices) {
    const bool is_chosen = std::visit(
        [&](auto value) {
          return options.*std::get<decltype(value) ServerOptions::*>(flag.member) == value;
        },
        choice.value);
    if (is_chosen) return choice.text;
  }
  return "";
}

std::string NumberText(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e18) {
    return absl::StrCat(static_cast<int64_t>(value));
  }
  char text[32];
  const std::to_chars_result end = std::to_chars(std::begin(text), std::end(text), value);
  return {text, end.ptr};
}

std::string BytesText(int64_t bytes) {
  constexpr std::pair<int, absl::string_view> kUnits[] = {{30, "GiB"}, {20, "MiB"}, {10, "KiB"}};
  for (const auto& [shift, unit] : kUnits) {
    const int64_t one = int64_t{1} << shift;
    if (bytes >= one && bytes % one == 0) return absl::StrCat(bytes / one, unit);
  }
  return absl::StrCat(bytes);
}

std::string FlagValueAsToml(const Flag& flag, const ServerOptions& options) {
  std::vector<std::string> values;
  for (const HeadValue& value : options.head_values) {
    if (value.flag == flag.name) {
      values.push_back(TomlString(absl::StrCat(value.head, "=", value.text)));
    }
  }
  std::string common = CommonValueAsToml(flag, options);
  if (values.empty()) return common;
  if (common != CommonValueAsToml(flag, ServerOptions())) {
    const bool is_text = absl::StartsWith(common, "\"");
    values.insert(values.begin(), is_text ? common : TomlString(common));
  }
  return absl::StrCat("[", absl::StrJoin(values, ", "), "]");
}

}  // namespace logprobd
