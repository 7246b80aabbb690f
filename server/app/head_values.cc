#include "server/app/head_values.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/errors.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

constexpr absl::string_view kModel = "model";
/// More have no use, and each has a queue, threads and series of its own.
constexpr size_t kHeadsMax = 64;
/// Of a value in a message.
constexpr size_t kTextBytesShown = 100;

/// Where the value begins in text that begins with NAME=.
std::optional<size_t> ValueBegin(absl::string_view text) {
  const size_t end = text.find_first_of("=/,");
  if (end == absl::string_view::npos || text[end] != '=' ||
      absl::StripAsciiWhitespace(text.substr(0, end)).empty()) {
    return std::nullopt;
  }
  return end + 1;
}

/// The length of the first value: up to a comma that NAME= follows.
size_t FirstLength(absl::string_view text) {
  for (size_t comma = text.find(','); comma != absl::string_view::npos;
       comma = text.find(',', comma + 1)) {
    if (ValueBegin(text.substr(comma + 1)).has_value()) {
      return comma;
    }
  }
  return text.size();
}

std::vector<const HeadValue*> ValuesOf(const ServerOptions& options, absl::string_view flag) {
  std::vector<const HeadValue*> values;
  for (const HeadValue& value : options.head_values) {
    if (value.flag == flag) {
      values.push_back(&value);
    }
  }
  return values;
}

std::string NamesOf(const std::vector<ServerOptions>& heads) {
  return absl::StrJoin(heads, ", ", [](std::string* out, const ServerOptions& head) {
    absl::StrAppend(out, head.head_name);
  });
}

/// `flag`: where the name stands.
absl::Status CheckName(absl::string_view flag, const std::string& name, size_t bytes_max) {
  if (name.empty() || name.size() > bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": a head's name has ", name.size(),
                                                   " bytes, must have 1 to ", bytes_max));
  }
  if (!IsUtf8(name) || HasControlCharacters(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": a head's name must be UTF-8 without control characters"));
  }
  if (name == "unknown") {
    return absl::InvalidArgumentError(absl::StrCat(
        flag,
        ": a head must not be \"unknown\": the metrics count requests for other heads there"));
  }
  return absl::OkStatus();
}

absl::Status CheckNames(const ServerOptions& options, const std::vector<ServerOptions>& heads) {
  // A request can name no longer one, and answers repeat it as UTF-8.
  constexpr size_t kNameBytesMax = 256;
  // Of several the metrics tell each from the others by its label, which is cut there.
  constexpr size_t kLabelBytesMax = 128;
  if (ValuesOf(options, kModel).empty()) {
    return CheckName("--head-name", options.head_name, kNameBytesMax);
  }
  if (!options.model.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--model has a folder without a name, ",
                                                   options.model, ", beside the heads ",
                                                   NamesOf(heads), ": write NAME=DIR for each"));
  }
  if (options.head_name != ServerOptions().head_name) {
    return absl::InvalidArgumentError(
        "--head-name names the head of a plain --model: with --model NAME=DIR leave it out");
  }
  if (heads.size() > kHeadsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("--model names ", heads.size(), " heads, must be at most ", kHeadsMax));
  }
  for (const ServerOptions& head : heads) {
    LOGPROBD_RETURN_IF_ERROR(CheckName("--model", head.head_name, kLabelBytesMax));
    if (head.model.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--model has no folder for head \"", head.head_name, "\""));
    }
  }
  return absl::OkStatus();
}

}  // namespace

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
  // A stronger source replaces all that a weaker one said, so that no value of a head is left over.
  const ServerOptions defaults;
  std::visit([&](auto member) { options.*member = defaults.*member; }, flag.member);
  std::erase_if(options.head_values,
                [&flag](const HeadValue& value) { return value.flag == flag.name; });
  bool has_plain = false;
  for (const std::string& text : texts) {
    for (HeadText& part : SplitByHead(flag, text)) {
      const bool is_plain = part.head.empty();
      const std::string whose = is_plain ? "" : absl::StrCat(" for head \"", part.head, "\"");
      const auto is_same = [&](const HeadValue& value) {
        return value.flag == flag.name && value.head == part.head;
      };
      if (is_plain ? has_plain : absl::c_any_of(options.head_values, is_same)) {
        return absl::InvalidArgumentError(
            absl::StrCat("is given twice", is_plain ? " without a head's name" : whose));
      }
      ServerOptions scratch;
      const absl::Status status = SetFlag(flag, part.text, is_plain ? options : scratch);
      if (!status.ok()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "is \"", part.text.substr(0, kTextBytesShown), "\"", whose, ": it ", status.message()));
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

std::vector<ServerOptions> HeadOptions(const ServerOptions& options) {
  ServerOptions common = options;
  common.head_values.clear();
  std::vector<ServerOptions> heads;
  for (const HeadValue* const model : ValuesOf(options, kModel)) {
    heads.push_back(common);
    heads.back().head_name = model->head;
  }
  if (heads.empty()) {
    heads.push_back(common);
  }
  for (ServerOptions& head : heads) {
    head.queue_bytes =
        std::max<int64_t>(options.queue_bytes / static_cast<int64_t>(heads.size()), 1);
    for (const HeadValue& value : options.head_values) {
      if (value.head == head.head_name) {
        SetFlag(*FindFlag(value.flag), value.text, head).IgnoreError();  // it has been checked
      }
    }
  }
  return heads;
}

absl::Status CheckHeads(const ServerOptions& options) {
  const std::vector<ServerOptions> heads = HeadOptions(options);
  if (heads.front().model.empty() && ValuesOf(options, kModel).empty()) {
    return absl::InvalidArgumentError(
        "--model is missing: name a model folder (config.json and safetensors); see --help");
  }
  LOGPROBD_RETURN_IF_ERROR(CheckNames(options, heads));
  for (const HeadValue& value : options.head_values) {
    const auto has_name = [&value](const ServerOptions& head) {
      return head.head_name == value.head;
    };
    if (absl::c_none_of(heads, has_name)) {
      return absl::InvalidArgumentError(absl::StrCat("--", value.flag, " is for a head \"",
                                                     value.head.substr(0, kTextBytesShown),
                                                     "\", but there is: ", NamesOf(heads)));
    }
  }
  return absl::OkStatus();
}

}  // namespace logprobd
