#include "server/weights/hub_cache.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "server/base/errors.h"
#include "server/weights/regular_file.h"
#include "server/weights/untrusted_text.h"

namespace logprobd {

namespace fs = std::filesystem;

namespace {

constexpr absl::string_view kModelPrefix = "models--";
constexpr absl::string_view kSnapshots = "snapshots";
// Selects a single file, or the index of several, but none of the files that an index names.
constexpr absl::string_view kWeightsPattern = "--include 'model.safetensors*'";

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool IsIdPart(absl::string_view part) {
  return !part.empty() && part.front() != '-' && part.front() != '.' &&
         !absl::StrContains(part, "--") && !absl::StrContains(part, "..") &&
         std::all_of(part.begin(), part.end(), [](unsigned char c) {
           return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.';
         });
}

/// Returns whether `text` has the form ORG/NAME of an id of the hub, which needs no quotes in a
/// shell and stays inside the cache as the name of a folder.
bool IsModelId(absl::string_view text) {
  constexpr size_t kIdBytesMax = 96;  // the hub's own limit
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '/');
  return text.size() <= kIdBytesMax && parts.size() == 2 && IsIdPart(parts[0]) &&
         IsIdPart(parts[1]);
}

bool IsCommit(absl::string_view text) {
  constexpr size_t kCommitDigits = 40;
  return text.size() == kCommitDigits &&
         std::all_of(text.begin(), text.end(), absl::ascii_isxdigit);
}

bool IsFolder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

absl::Status NotInCache(const std::string& model, const std::string& cache_folder) {
  return absl::NotFoundError(absl::StrCat(
      PrintableName(model), " is neither a path on this host nor a model in Hugging Face's cache (",
      cache_folder.empty() ? "neither HF_HOME nor HOME is set" : PrintableName(cache_folder),
      "); models are not downloaded by the server: fetch the files of the head with: hf download ",
      model, " config.json && hf download ", model, " ", kWeightsPattern,
      "; or copy a folder that logprobctl export-head has written on another host"));
}

/// Returns the commit of the main branch. Returns NOT_FOUND if it was never downloaded.
absl::StatusOr<std::string> MainCommit(const fs::path& repository) {
  const std::string path = (repository / "refs" / "main").string();
  LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<RegularFile> file, RegularFile::Open(path));
  constexpr int64_t kBytesMax = 256;
  std::string text(static_cast<size_t>(std::min(file->size_bytes(), kBytesMax)), '\0');
  LOGPROBD_RETURN_IF_ERROR(file->Read(0, {reinterpret_cast<std::byte*>(text.data()), text.size()}));
  absl::StripAsciiWhitespace(&text);
  if (!IsCommit(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat(PrintableName(path), " does not contain a commit; download the model again"));
  }
  return text;
}

/// Returns the first part of `path` that is the folder of a model in a hub's cache, or an empty
/// path if there is none.
fs::path RepositoryOf(const fs::path& path) {
  fs::path repository;
  for (auto part = path.begin(); part != path.end(); ++part) {
    repository /= *part;
    const auto next = std::next(part);
    if (absl::StartsWith(part->string(), kModelPrefix) && next != path.end() &&
        next->string() == kSnapshots) {
      return repository;
    }
  }
  return {};
}

}  // namespace

std::string HubCacheFolder() {
  for (const char* const name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    if (std::string folder = Variable(name); !folder.empty()) return folder;
  }
  for (const auto& [name, below] :
       {std::pair("HF_HOME", "hub"), std::pair("XDG_CACHE_HOME", "huggingface/hub"),
        std::pair("HOME", ".cache/huggingface/hub")}) {
    if (const std::string folder = Variable(name); !folder.empty()) {
      return (fs::path(folder) / below).string();
    }
  }
  return "";
}

absl::StatusOr<std::string> FindModel(const std::string& model, const std::string& cache_folder) {
  std::error_code error;
  if (!IsModelId(model) || fs::status(model, error).type() != fs::file_type::not_found) {
    return model;
  }
  const fs::path repository = fs::path(cache_folder) /
                              absl::StrCat(kModelPrefix, absl::StrReplaceAll(model, {{"/", "--"}}));
  const absl::StatusOr<std::string> commit = MainCommit(repository);
  if (absl::IsNotFound(commit.status())) return NotInCache(model, cache_folder);
  LOGPROBD_RETURN_IF_ERROR(commit.status());
  const fs::path snapshot = repository / std::string(kSnapshots) / *commit;
  return IsFolder(snapshot) ? absl::StatusOr<std::string>(snapshot.string())
                            : NotInCache(model, cache_folder);
}

std::string HubDownloadHint(const std::string& folder, absl::string_view file) {
  std::error_code error;
  const fs::path path = fs::absolute(folder, error).lexically_normal();
  const fs::path repository = RepositoryOf(path);
  if (repository.empty()) return "";
  const std::string name = repository.filename().string();
  const std::string id = absl::StrReplaceAll(absl::StripPrefix(name, kModelPrefix), {{"--", "/"}});
  const fs::path below = path.lexically_relative(repository / std::string(kSnapshots));
  const std::string commit = below.begin()->string();
  // The command is meant to be copied into a shell, so nothing else may get into it.
  if (!IsModelId(id) || !IsCommit(commit) ||
      !std::all_of(file.begin(), file.end(), [](unsigned char c) {
        return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.' || c == '/';
      })) {
    return "";
  }
  return absl::StrCat("; fetch it with: hf download ", id, " --revision ", commit, " ",
                      file.empty() ? kWeightsPattern : file);
}

std::vector<std::string> HubFoldersOf(const std::string& path) {
  std::error_code error;
  fs::path repository = RepositoryOf(fs::absolute(path, error).lexically_normal());
  if (repository.empty()) repository = RepositoryOf(fs::canonical(path, error));
  if (repository.empty()) return {};
  std::vector<std::string> folders = {repository.string()};
  if (const fs::path shared = repository.parent_path() / "blobs"; IsFolder(shared)) {
    folders.push_back(shared.string());
  }
  return folders;
}

}  // namespace logprobd
