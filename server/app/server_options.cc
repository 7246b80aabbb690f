#include "server/app/server_options.h"

#include <sys/un.h>

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
#include "server/app/head_values.h"
#include "server/base/errors.h"
#include "server/base/listen_address.h"

namespace logprobd {
namespace {

constexpr absl::string_view kAuto = "auto";

std::string WithDashes(absl::string_view name) { return absl::StrReplaceAll(name, {{"_", "-"}}); }

/// Number of letters to insert, delete or replace.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) {
    row[j] = j;
  }
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row.back();
}

/// 67108864 as "64MiB"; other numbers as they are.
std::string BytesText(int64_t bytes) {
  constexpr std::pair<int, absl::string_view> kUnits[] = {{30, "GiB"}, {20, "MiB"}, {10, "KiB"}};
  for (const auto& [shift, unit] : kUnits) {
    const int64_t one = int64_t{1} << shift;
    if (bytes >= one && bytes % one == 0) {
      return absl::StrCat(bytes / one, unit);
    }
  }
  return absl::StrCat(bytes);
}

std::string RangeText(const Flag& flag) {
  if (flag.kind == Flag::Kind::kBytes) {
    return absl::StrCat("must be bytes, as in 64MiB or 67108864, from ",
                        BytesText(static_cast<int64_t>(flag.min)), " to ",
                        BytesText(static_cast<int64_t>(flag.max)));
  }
  return absl::StrCat("must be ", flag.kind == Flag::Kind::kCount ? "auto or " : "",
                      flag.kind == Flag::Kind::kNumber ? "a number" : "a whole number", " from ",
                      NumberText(flag.min), " to ", NumberText(flag.max));
}

std::optional<int64_t> ParseInteger(absl::string_view text) {
  int64_t value = 0;
  if (absl::StartsWith(text, "+") || !absl::SimpleAtoi(text, &value)) {
    return std::nullopt;
  }
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
  if (!value.has_value() || *value > (kLargest >> shift) || *value < -kLargest) {
    return std::nullopt;
  }
  return *value < 0 ? *value : *value << shift;
}

absl::Status SetNumber(const Flag& flag, absl::string_view text, ServerOptions& options) {
  absl::Status error = absl::InvalidArgumentError(RangeText(flag));
  if (flag.kind == Flag::Kind::kNumber) {
    double value = 0;
    if (!absl::SimpleAtod(text, &value) || !(value >= flag.min && value <= flag.max)) {
      return error;
    }
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
            absl::StrCat("must be auto or numbers of GPUs with commas between, as in 0,1; \"",
                         item.substr(0, 20), "\" is not one from ", NumberText(flag.min), " to ",
                         NumberText(flag.max)));
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

absl::Status SetText(const Flag& flag, absl::string_view text, ServerOptions& options) {
  if (flag.kind == Flag::Kind::kChoice && absl::c_find(flag.choices, text) == flag.choices.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("must be one of: ", absl::StrJoin(flag.choices, ", ")));
  }
  if (text.find('\0') != absl::string_view::npos) {
    return absl::InvalidArgumentError("must not hold a NUL byte");
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

absl::Status CheckReceiveBytes(const ServerOptions& options) {
  const std::string receive = absl::StrCat("--receive-bytes ", BytesText(options.receive_bytes));
  // One message while another waits for its rows to be copied.
  if (options.receive_bytes / 2 < options.max_message_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(receive, " must hold two messages: it is below twice --max-message-bytes ",
                     BytesText(options.max_message_bytes)));
  }
  // What is queued counts against it.
  if (options.receive_bytes <= options.queue_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(receive, " must be larger than --queue-bytes ", BytesText(options.queue_bytes),
                     ": with a full queue nothing could be received, not even to be refused"));
  }
  return absl::OkStatus();
}

/// What of replicas and shards is wrong whatever the GPUs are: `--device auto` would take the CPU.
absl::Status CheckLayout(const ServerOptions& options) {
  if (options.gpus.empty()) {
    return absl::OkStatus();
  }
  if (options.device == "cpu") {
    return absl::InvalidArgumentError("--gpus names GPUs, but --device cpu was asked for");
  }
  const auto given = static_cast<int64_t>(options.gpus.size());
  const int64_t asked =
      std::max<int64_t>(options.replicas, 1) * std::max<int64_t>(options.shards, 1);
  const bool is_fixed = options.replicas > 0 && options.shards > 0;
  if (given % asked != 0 || (is_fixed && given != asked)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--gpus names ", given, given == 1 ? " GPU" : " GPUs", ", but --replicas ",
                     FlagValueAsToml(*FindFlag("replicas"), options), " x --shards ",
                     FlagValueAsToml(*FindFlag("shards"), options), " cannot use ",
                     given == 1 ? "it" : "all of them"));
  }
  return absl::OkStatus();
}

absl::Status CheckCudaIpc(const ServerOptions& options) {
  if (options.cuda_ipc && options.device == "cpu") {
    return absl::InvalidArgumentError(
        "--cuda-ipc reads GPUs' memory, but --device cpu was asked for");
  }
  if (options.cuda_ipc && options.local.empty()) {
    return absl::InvalidArgumentError(
        "--cuda-ipc needs the control socket, but --local none was asked for");
  }
  return absl::OkStatus();
}

absl::Status CheckAddresses(const ServerOptions& options) {
  const std::pair<absl::string_view, absl::string_view> addresses[] = {
      {"--listen", options.listen}, {"--http", options.http}, {"--admin", options.admin}};
  for (const auto& [flag, text] : addresses) {
    if (text.empty() && flag != "--listen") {
      continue;
    }
    LOGPROBD_ASSIGN_OR_RETURN(const ListenAddress address, ParseListenAddress(flag, text));
    LOGPROBD_RETURN_IF_ERROR(CheckPublic(flag, address, options.insecure));
  }
  // The control socket has ".control" behind it.
  constexpr size_t kSocketPathBytesMax = sizeof(sockaddr_un::sun_path) - 1 - 8;
  if (options.local.size() > kSocketPathBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("--local: a path of ", options.local.size(),
                                                   " bytes, must have at most ",
                                                   kSocketPathBytesMax));
  }
  return absl::OkStatus();
}

/// Of all heads that have none of their own.
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
  const int64_t value = options.*std::get<int64_t ServerOptions::*>(flag.member);
  if (flag.kind == Flag::Kind::kCount && value == 0) {
    return TomlString(kAuto);
  }
  const std::string text = flag.kind == Flag::Kind::kBytes ? BytesText(value) : absl::StrCat(value);
  return std::isdigit(static_cast<unsigned char>(text.back())) != 0 ? text : TomlString(text);
}

/// The settings of one head, as HeadOptions gives them.
absl::Status CheckHead(const ServerOptions& head) {
  if (head.valid_vocab > 0 && head.include_padding) {
    return absl::InvalidArgumentError(
        "--valid-vocab and --include-padding contradict each other: use one of them");
  }
  return CheckLayout(head);
}

}  // namespace

std::string NumberText(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e18) {
    return absl::StrCat(static_cast<int64_t>(value));
  }
  char text[32];
  const std::to_chars_result end = std::to_chars(std::begin(text), std::end(text), value);
  return {text, end.ptr};
}

const Flag* FindFlag(absl::string_view name) {
  const std::string dashed = WithDashes(name);
  for (const Flag& flag : Flags()) {
    if (flag.name == dashed) {
      return &flag;
    }
  }
  return nullptr;
}

std::string NearestFlag(absl::string_view name) {
  // Long nonsense is cut: the distance takes time in proportion to its length.
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
    case Flag::Kind::kChoice:
    case Flag::Kind::kAddress:
      return SetText(flag, text, options);
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
  return absl::InternalError("no such kind of flag");
}

std::string FlagValueAsToml(const Flag& flag, const ServerOptions& options) {
  std::vector<std::string> of_heads;
  for (const HeadValue& value : options.head_values) {
    if (value.flag == flag.name) {
      of_heads.push_back(TomlString(absl::StrCat(value.head, "=", value.text)));
    }
  }
  std::string common = CommonValueAsToml(flag, options);
  if (of_heads.empty()) {
    return common;
  }
  if (common != CommonValueAsToml(flag, ServerOptions())) {
    const bool is_text = absl::StartsWith(common, "\"");
    of_heads.insert(of_heads.begin(), is_text ? common : TomlString(common));
  }
  return absl::StrCat("[", absl::StrJoin(of_heads, ", "), "]");
}

absl::Status CheckServerOptions(const ServerOptions& options) {
  LOGPROBD_RETURN_IF_ERROR(CheckHeads(options));
  const std::vector<ServerOptions> heads = HeadOptions(options);
  for (const ServerOptions& head : heads) {
    const absl::Status status = CheckHead(head);
    if (!status.ok()) {
      return heads.size() == 1 ? status
                               : WithContext(status, absl::StrCat("head \"", head.head_name, "\""));
    }
  }
  LOGPROBD_RETURN_IF_ERROR(CheckReceiveBytes(options));
  LOGPROBD_RETURN_IF_ERROR(CheckCudaIpc(options));
  return CheckAddresses(options);
}

}  // namespace logprobd
