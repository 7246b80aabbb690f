#include "server/weights/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/base/file_descriptor.h"
#include "server/weights/hub_cache.h"
#include "server/weights/untrusted_text.h"

namespace logprobd {

namespace fs = std::filesystem;

namespace {

constexpr absl::string_view kSingleFile = "model.safetensors";
constexpr absl::string_view kIndexFile = "model.safetensors.index.json";
constexpr std::array<absl::string_view, 5> kPickleSuffixes = {".bin", ".pt", ".pth", ".ckpt",
                                                              ".distcp"};

bool IsPickle(absl::string_view file_name) {
  for (const absl::string_view suffix : kPickleSuffixes) {
    if (absl::EndsWithIgnoreCase(file_name, suffix)) return true;
  }
  return false;
}

// `path` is the folder or the file that the user named.
absl::Status PickleUnsupported(const std::string& path, absl::string_view file_name) {
  return absl::UnimplementedError(absl::StrCat(
      PrintableName(file_name),
      " is a pickle file, which is never loaded since it can run code; "
      "write the model's head to a folder once: pip install torch and logprobd's Python client, "
      "then python -m logprobd.export_head ",
      PrintableName(path), " OUT"));
}

absl::Status GgufUnsupported(absl::string_view file_name) {
  return absl::UnimplementedError(
      absl::StrCat(PrintableName(file_name),
                   " is a GGUF file; give the folder of the original safetensors checkpoint"));
}

absl::Status PathError(const std::string& path, const std::error_code& error) {
  if (error == std::errc::permission_denied) {
    return absl::PermissionDeniedError(absl::StrCat(
        PrintableName(path), " cannot be read; give the server's user read permission"));
  }
  const std::string message = absl::StrCat(PrintableName(path), ": ", error.message());
  return error == std::errc::too_many_symbolic_link_levels || error == std::errc::filename_too_long
             ? absl::InvalidArgumentError(message)
             : absl::UnavailableError(message);
}

// Returns the error for a folder with neither the single file nor an index. It names what the
// folder contains instead. `opened` is a path of the folder that stays the same folder.
absl::Status ExplainNoWeights(const std::string& folder, const fs::path& opened) {
  std::error_code error;
  fs::directory_iterator entries(opened, error);
  std::string pickle;
  std::string gguf;
  std::string safetensors;
  bool is_cache = false;
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    if (IsPickle(name)) {
      pickle = name;
    } else if (absl::EndsWith(name, ".gguf")) {
      gguf = name;
    } else if (absl::EndsWith(name, ".safetensors")) {
      safetensors = name;
    } else if (name == "snapshots") {
      is_cache = true;
    }
  }
  if (error) return PathError(folder, error);
  const std::string no_weights =
      absl::StrCat(PrintableName(folder), " has neither ", kSingleFile, " nor ", kIndexFile);
  if (is_cache) {
    return absl::NotFoundError(
        absl::StrCat(no_weights,
                     "; it is a download cache: give one of the folders in its "
                     "'snapshots' folder"));
  }
  if (absl::StartsWith(safetensors, "adapter_")) {
    return absl::NotFoundError(
        absl::StrCat(no_weights, "; it contains an adapter: merge it into its base model first"));
  }
  if (!safetensors.empty()) {
    return absl::NotFoundError(absl::StrCat(no_weights, "; to use ", PrintableName(safetensors),
                                            ", give the path of that file"));
  }
  if (!pickle.empty()) return PickleUnsupported(folder, pickle);
  if (!gguf.empty()) return GgufUnsupported(gguf);
  return absl::NotFoundError(absl::StrCat(no_weights, HubDownloadHint(folder, "")));
}

absl::StatusOr<ModelPaths> PathsOfFile(const fs::path& path) {
  const std::string name = path.filename().string();
  const std::string folder =
      path.has_parent_path() ? path.parent_path().string() : std::string(".");
  if (IsPickle(name)) return PickleUnsupported(path.string(), name);
  if (absl::EndsWith(name, ".gguf")) return GgufUnsupported(name);
  const bool indexed = absl::EndsWith(name, ".safetensors.index.json");
  if (!indexed && !absl::EndsWith(name, ".safetensors")) {
    return absl::InvalidArgumentError(
        absl::StrCat(PrintableName(path.string()),
                     " is neither a model folder nor a .safetensors file nor an index"));
  }
  return ModelPaths{folder, path.string(), indexed};
}

}  // namespace

absl::StatusOr<ModelPaths> FindModelPaths(const std::string& path, const AllowedRoots* roots) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError("the model's path is empty or contains a NUL");
  }
  const FileDescriptor folder(open(path.c_str(), O_PATH | O_CLOEXEC));
  if (!folder.is_open()) {
    if (errno != ENOENT && errno != ENOTDIR) {
      return PathError(path, std::error_code(errno, std::generic_category()));
    }
    return absl::NotFoundError(absl::StrCat(
        PrintableName(path),
        " does not exist; the model must be a local folder (models are not downloaded by name)"));
  }
  if (roots != nullptr) {
    LOGPROBD_RETURN_IF_ERROR(roots->CheckDescriptor(folder.get(), path));
  }
  struct stat info {};
  if (fstat(folder.get(), &info) != 0) {
    return PathError(path, std::error_code(errno, std::generic_category()));
  }
  if (!S_ISDIR(info.st_mode)) return PathsOfFile(path);
  // By now the path may lead elsewhere. If roots restrict it, only the folder that was checked is
  // looked into.
  const fs::path opened = roots == nullptr ? path : absl::StrCat("/proc/self/fd/", folder.get());
  std::error_code error;
  for (const absl::string_view name : {kSingleFile, kIndexFile}) {
    // A dangling link counts as present, so that the error of opening it explains the problem.
    const fs::path file = std::string(name);
    if (fs::symlink_status(opened / file, error).type() != fs::file_type::not_found && !error) {
      const fs::path index = std::string(kIndexFile);
      // No link is followed, since it may lead out of the roots.
      const bool has_other =
          name == kSingleFile &&
          fs::symlink_status(opened / index, error).type() != fs::file_type::not_found;
      return ModelPaths{path, (fs::path(path) / file).string(), name == kIndexFile,
                        has_other ? (fs::path(path) / index).string() : ""};
    }
    if (error && error != std::errc::no_such_file_or_directory) return PathError(path, error);
  }
  return ExplainNoWeights(path, opened);
}

Checkpoint::Checkpoint(ModelPaths paths, HeadNames& names, const AllowedRoots* roots)
    : paths_(std::move(paths)), names_(&names), roots_(roots) {}

absl::StatusOr<Checkpoint> Checkpoint::Open(const ModelPaths& paths, HeadNames& names,
                                            const AllowedRoots* roots) {
  Checkpoint checkpoint(paths, names, roots);
  if (paths.indexed) {
    LOGPROBD_ASSIGN_OR_RETURN(checkpoint.index_, RegularFile::Open(paths.weights, roots));
    auto files = ReadSafetensorsIndex(
        *checkpoint.index_, [&names](absl::string_view name) { return names.Wants(name); });
    if (!files.ok()) return WithContext(files.status(), PrintableName(paths.weights));
    checkpoint.files_ = *std::move(files);
    return checkpoint;
  }
  const std::string file_name = fs::path(paths.weights).filename().string();
  LOGPROBD_ASSIGN_OR_RETURN(const Shard* shard, checkpoint.OpenShard(file_name));
  for (const TensorEntry& entry : shard->header.tensors) checkpoint.files_[entry.name] = file_name;
  return checkpoint;
}

absl::StatusOr<const Checkpoint::Shard*> Checkpoint::OpenShard(const std::string& file_name) {
  std::unique_ptr<Shard>& slot = shards_[file_name];
  if (slot == nullptr) {
    const std::string path = (fs::path(paths_.folder) / file_name).string();
    LOGPROBD_ASSIGN_OR_RETURN(auto file, RegularFile::Open(path, roots_));
    auto header = ReadSafetensorsHeader(
        *file, [this](absl::string_view name) { return names_->Wants(name); });
    if (!header.ok()) return WithContext(header.status(), PrintableName(path));
    for (const TensorEntry& entry : header->tensors) {
      if (paths_.indexed && !files_.contains(entry.name)) unlisted_.push_back(entry.name);
    }
    slot = std::make_unique<Shard>(Shard{std::move(file), *std::move(header)});
  }
  return slot.get();
}

absl::StatusOr<StoredTensor> Checkpoint::Find(absl::string_view name) {
  const auto file_name = files_.find(name);
  if (file_name == files_.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat(PrintableName(paths_.weights), " has no tensor ", PrintableName(name)));
  }
  auto shard = OpenShard(file_name->second);
  if (!shard.ok()) {
    if (!absl::IsNotFound(shard.status()) || !paths_.indexed) return shard.status();
    const std::string hint = HubDownloadHint(paths_.folder, file_name->second);
    return absl::NotFoundError(absl::StrCat(
        "the index places ", PrintableName(name), " in a file that is missing",
        hint.empty() ? " (download it again)" : "", ": ", shard.status().message(), hint));
  }
  const TensorEntry* entry = (*shard)->header.Find(name);
  if (entry == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the index places ", PrintableName(name), " in ", PrintableName((*shard)->file->path()),
        ", which has no such tensor; index and files belong to different checkpoints"));
  }
  return StoredTensor{(*shard)->file, *entry};
}

}  // namespace logprobd
