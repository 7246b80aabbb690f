#include "server/app/options/toml_file.h"

#include <exception>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

/// Larger files are rejected without being read, because they are not configuration files.
constexpr std::uintmax_t kFileBytesMax = 1 << 20;

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
  if (!file) {
    return absl::PermissionDeniedError(absl::StrCat(what, " ", path, " cannot be read"));
  }
  try {
    return toml::parse(file, path);
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", path, ": ", OneLine(e.what())));
  }
}

}  // namespace logprobd
