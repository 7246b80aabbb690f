#include "server/weights/python_json.h"

#include <array>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

constexpr int kDepthMax = 64;
constexpr std::array<absl::string_view, 3> kNotFinite = {"NaN", "Infinity", "-Infinity"};
constexpr std::array<absl::string_view, 3> kQuoted = {"\"NaN\"", "\"Infinity\"", "\"-Infinity\""};

/// Returns the length in bytes of the string literal at the front of `text`.
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
        for (size_t i = 0; const absl::string_view name : kNotFinite) {
          if (absl::StartsWith(text, name)) {
            length = name.size();
            written = kQuoted[i];
          }
          ++i;
        }
        break;
    }
    strict.append(written.data(), written.size());
    text.remove_prefix(length);
  }
  return strict;
}

}  // namespace logprobd
