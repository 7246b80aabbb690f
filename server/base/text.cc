#include "server/base/text.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace logprobd {
namespace {

uint8_t ByteAt(absl::string_view text, size_t index) { return static_cast<uint8_t>(text[index]); }

bool IsContinuation(uint8_t byte) { return (byte & 0xC0) == 0x80; }

/// Returns the code point of a well-formed sequence.
uint32_t CodePointOf(absl::string_view sequence) {
  uint32_t code = ByteAt(sequence, 0);
  if (sequence.size() > 1) code &= 0x7FU >> sequence.size();
  for (size_t i = 1; i < sequence.size(); ++i) code = code << 6 | (ByteAt(sequence, i) & 0x3FU);
  return code;
}

constexpr uint32_t kReplacement = 0xFFFD;

}  // namespace

size_t Utf8SequenceLength(absl::string_view text) {
  if (text.empty()) return 0;
  const uint8_t lead = ByteAt(text, 0);
  if (lead < 0x80) return 1;
  size_t length = 0;
  // The range of the second byte is narrower after some lead bytes, which excludes overlong forms
  // (E0, F0), surrogates (ED) and values above U+10FFFF (F4).
  uint8_t second_min = 0x80;
  uint8_t second_max = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    second_min = lead == 0xE0 ? 0xA0 : 0x80;
    second_max = lead == 0xED ? 0x9F : 0xBF;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    second_min = lead == 0xF0 ? 0x90 : 0x80;
    second_max = lead == 0xF4 ? 0x8F : 0xBF;
  } else {
    return 0;
  }
  if (length > text.size()) return 0;
  const uint8_t second = ByteAt(text, 1);
  if (second < second_min || second > second_max) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (!IsContinuation(ByteAt(text, i))) return 0;
  }
  return length;
}

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t length = Utf8SequenceLength(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

absl::string_view CutUtf8(absl::string_view text, size_t bytes_max) {
  if (text.size() <= bytes_max) return text;
  size_t length = bytes_max;
  while (length > 0 && IsContinuation(ByteAt(text, length))) --length;
  return text.substr(0, length);
}

std::string ToUtf8(absl::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t length = Utf8SequenceLength(text);
    if (length == 0) {
      result.push_back('?');
      text.remove_prefix(1);
    } else {
      result.append(text.data(), length);
      text.remove_prefix(length);
    }
  }
  return result;
}

bool HasControlCharacters(absl::string_view text) {
  for (size_t index = 0; index < text.size(); ++index) {
    const auto byte = static_cast<uint8_t>(text[index]);
    if (byte < 0x20 || byte == 0x7F) return true;
    // C1 controls are C2 80 to C2 9F.
    if (byte == 0xC2 && index + 1 < text.size() && static_cast<uint8_t>(text[index + 1]) < 0xA0) {
      return true;
    }
  }
  return false;
}

bool IsUnsafeToShow(absl::string_view sequence) {
  const uint32_t code = CodePointOf(sequence);
  const auto is_in = [code](uint32_t first, uint32_t last) {
    return code >= first && code <= last;
  };
  return code < 0x20 || is_in(0x7F, 0x9F) || code == 0x061C || is_in(0x200E, 0x200F) ||
         is_in(0x2028, 0x202E) || is_in(0x2066, 0x2069);
}

std::string OneLine(absl::string_view text, size_t bytes_max, absl::string_view also_escaped) {
  const size_t text_bytes = text.size();
  std::string line;
  line.reserve(std::min(text_bytes, bytes_max));
  while (!text.empty()) {
    const size_t length = Utf8SequenceLength(text);
    const absl::string_view sequence = text.substr(0, std::max<size_t>(length, 1));
    const size_t begin = line.size();
    if (length == 0 || IsUnsafeToShow(sequence)) {
      absl::StrAppendFormat(&line, "\\u%04x", length == 0 ? kReplacement : CodePointOf(sequence));
    } else {
      if (absl::StrContains(also_escaped, sequence)) line.push_back('\\');
      absl::StrAppend(&line, sequence);
    }
    if (line.size() > bytes_max) {
      line.resize(begin);
      absl::StrAppend(&line, "...(", text_bytes, " bytes)");
      break;
    }
    text.remove_prefix(sequence.size());
  }
  return line;
}

std::string HumanBytes(int64_t bytes) {
  constexpr std::pair<int64_t, absl::string_view> kUnits[] = {
      {int64_t{1} << 30, "GiB"}, {int64_t{1} << 20, "MiB"}, {int64_t{1} << 10, "KiB"}};
  for (const auto& [one, unit] : kUnits) {
    if (bytes >= 10 * one || (bytes >= one && one > 1024)) {
      return absl::StrFormat("%.1f %s", static_cast<double>(bytes) / static_cast<double>(one),
                             unit);
    }
  }
  return absl::StrCat(bytes, " B");
}

}  // namespace logprobd
