#include "server/app/options/toml_file.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

/// Larger files are rejected without being read, because they are not configuration files.
constexpr std::uintmax_t kFileBytesMax = 1 << 20;

/// Maximum depth of arrays and tables in each other; toml11 takes some of the stack for each level.
constexpr int kNestingMax = 32;

/// Returns the position after the string or comment that begins at `begin`, or `begin` itself if
/// none does.
size_t SkipText(absl::string_view text, size_t begin) {
  if (text[begin] == '#') return std::min(text.find('\n', begin), text.size());
  const char quote = text[begin];
  if (quote != '"' && quote != '\'') return begin;
  const std::string triple(3, quote);
  const bool is_long = absl::StartsWith(text.substr(begin), triple);
  size_t i = begin + (is_long ? triple.size() : 1);
  while (i < text.size()) {
    if (quote == '"' && text[i] == '\\') {
      i += 2;
    } else if (is_long && absl::StartsWith(text.substr(i), triple)) {
      // Up to two further quotes belong to the string.
      return std::min({text.find_first_not_of(quote, i), i + triple.size() + 2, text.size()});
    } else if (!is_long && (text[i] == quote || text[i] == '\n')) {
      return i + 1;
    } else {
      ++i;
    }
  }
  return text.size();
}

bool IsNestedTooDeeply(absl::string_view text) {
  int depth = 0;
  for (size_t i = 0; i < text.size();) {
    const size_t after = SkipText(text, i);
    if (after > i) {
      i = after;
      continue;
    }
    const char c = text[i++];
    if (c == '[' || c == '{') {
      if (++depth > kNestingMax) return true;
    } else if ((c == ']' || c == '}') && depth > 0) {
      --depth;
    }
  }
  return false;
}

bool IsForbiddenControl(unsigned char c) {
  return absl::ascii_iscntrl(c) && c != '\t' && c != '\n' && c != '\r';
}

}  // namespace

// toml11 explains an error in several lines, and the first of them say what is wrong and where.
std::string OneLine(absl::string_view text) {
  std::string line;
  for (const char c : text) {
    const bool is_space = absl::ascii_isspace(static_cast<unsigned char>(c)) ||
                          absl::ascii_iscntrl(static_cast<unsigned char>(c));
    if (!is_space) {
      line.push_back(c);
    } else if (!line.empty() && line.back() != ' ') {
      line.push_back(' ');
    }
  }
  return std::string(absl::StripAsciiWhitespace(line)).substr(0, 400);
}

absl::StatusOr<toml::value> ParseTomlFile(absl::string_view what, const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) {
    return absl::NotFoundError(absl::StrCat(what, " ", path, " does not exist"));
  }
  if (status.type() != std::filesystem::file_type::regular) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", path, " is not a regular file"));
  }
  if (std::filesystem::file_size(path, error) > kFileBytesMax || error) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", path, " is larger than 1 MiB"));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::PermissionDeniedError(absl::StrCat(what, " ", path, " cannot be read"));
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // TOML allows neither of them, and toml11 3.7 reads beyond its buffer at some of them.
  if (!IsUtf8(text) || absl::c_any_of(text, IsForbiddenControl)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " ", path, " contains a control character or is not UTF-8"));
  }
  if (IsNestedTooDeeply(text)) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, " ", path, " has arrays or tables more than ", kNestingMax, " deep in each other"));
  }
  try {
    std::istringstream stream(std::move(text));
    return toml::parse(stream, path);
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", path, ": ", OneLine(e.what())));
  }
}

}  // namespace logprobd
