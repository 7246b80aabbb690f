#include "server/weights/head_export.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/base/errors.h"
#include "server/base/sha256.h"
#include "server/weights/content_check.h"
#include "server/weights/head_config.h"
#include "server/weights/head_names.h"
#include "server/weights/head_source.h"
#include "server/weights/head_weights.h"
#include "server/weights/hub_cache.h"
#include "server/weights/untrusted_text.h"

namespace logprobd {
namespace {

namespace fs = std::filesystem;

using Json = nlohmann::json;  // sorts its keys

constexpr int64_t kBlockBytes = int64_t{4} << 20;
constexpr absl::string_view kWeightsFile = "model.safetensors";
constexpr absl::string_view kConfigFile = "config.json";
constexpr absl::string_view kManifestFile = "manifest.json";
/// Name of a head whose own name would only be found with --head-tensor, or as an embedding.
constexpr absl::string_view kDefaultTensor = "lm_head.weight";

absl::Status WriteError(const std::string& path, int error) {
  return absl::UnavailableError(
      absl::StrCat("cannot write ", PrintableName(path), ": ", std::strerror(error)));
}

/// Checks that `out` is absent, an empty folder or, with `force`, the folder of an export.
absl::Status CheckReplaceable(const std::string& out, bool force) {
  std::error_code error;
  const fs::file_type type = fs::symlink_status(out, error).type();
  if (type == fs::file_type::not_found) return absl::OkStatus();
  if (type != fs::file_type::directory) {
    return absl::FailedPreconditionError(
        absl::StrCat(PrintableName(out), " exists and is not a folder"));
  }
  bool has_manifest = false;
  std::string foreign;
  bool is_empty = true;
  for (fs::directory_iterator entry(out, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    is_empty = false;
    has_manifest = has_manifest || name == kManifestFile;
    if (name != kWeightsFile && name != kConfigFile && name != kManifestFile) foreign = name;
  }
  if (error) {
    return absl::FailedPreconditionError(absl::StrCat(PrintableName(out), ": ", error.message()));
  }
  if (is_empty) return absl::OkStatus();
  if (!force) {
    return absl::AlreadyExistsError(absl::StrCat(
        PrintableName(out), " exists; --force replaces a folder that export-head wrote"));
  }
  if (!has_manifest || !foreign.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(PrintableName(out), " was not written by export-head (",
                     foreign.empty() ? absl::StrCat("it has no ", kManifestFile)
                                     : absl::StrCat("it contains ", PrintableName(foreign)),
                     "), so --force does not delete it: remove it, or name another folder"));
  }
  return absl::OkStatus();
}

/// A new folder under a temporary name, which gets the name `out` when it is complete. The
/// destructor removes a folder that is not.
class StagedFolder {
 public:
  static absl::StatusOr<std::unique_ptr<StagedFolder>> Create(const std::string& out, bool force) {
    LOGPROBD_RETURN_IF_ERROR(CheckReplaceable(out, force));
    const std::string staged = absl::StrCat(out, ".partial-", getpid());
    std::error_code error;
    if (!fs::create_directory(staged, error)) {
      return WriteError(staged, error ? error.value() : EEXIST);
    }
    return std::unique_ptr<StagedFolder>(new StagedFolder(out, staged, force));
  }

  ~StagedFolder() {
    std::error_code error;
    fs::remove_all(staged_, error);
  }
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  const std::string& path() const { return staged_; }
  std::string PathOf(absl::string_view name) const { return absl::StrCat(staged_, "/", name); }

  absl::Status Publish() {
    LOGPROBD_RETURN_IF_ERROR(CheckReplaceable(out_, force_));
    std::error_code error;
    fs::rename(staged_, out_, error);
    if (error != std::errc::directory_not_empty && error != std::errc::file_exists) {
      return error ? WriteError(out_, error.value()) : absl::OkStatus();
    }
    const std::string replaced = absl::StrCat(staged_, ".replaced");
    fs::rename(out_, replaced, error);
    if (!error) {
      fs::rename(staged_, out_, error);
      std::error_code ignored;
      if (error) {
        fs::rename(replaced, out_, ignored);
      } else {
        fs::remove_all(replaced, ignored);
      }
    }
    return error ? WriteError(out_, error.value()) : absl::OkStatus();
  }

 private:
  StagedFolder(std::string out, std::string staged, bool force)
      : out_(std::move(out)), staged_(std::move(staged)), force_(force) {}

  std::string out_;
  std::string staged_;
  bool force_;
};

struct FileDigest {
  int64_t num_bytes = 0;
  std::string sha256;
};

/// Describes a file in the manifest.
Json FileEntry(const FileDigest& file) {
  return {{"bytes", file.num_bytes}, {"sha256", file.sha256}};
}

/// A new file, which is hashed while it is written.
class OutputFile {
 public:
  static absl::StatusOr<std::unique_ptr<OutputFile>> Create(const std::string& path) {
    const int descriptor = open(path.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666);
    return descriptor < 0 ? absl::StatusOr<std::unique_ptr<OutputFile>>(WriteError(path, errno))
                          : std::unique_ptr<OutputFile>(new OutputFile(path, descriptor));
  }

  ~OutputFile() { close(descriptor_); }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  absl::Status Write(absl::Span<const std::byte> bytes) {
    sha256_.Add(bytes);
    num_bytes_ += static_cast<int64_t>(bytes.size());
    while (!bytes.empty()) {
      const ssize_t written = write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno != EINTR) return WriteError(path_, errno);
      bytes.remove_prefix(static_cast<size_t>(std::max<ssize_t>(written, 0)));
    }
    return absl::OkStatus();
  }

  absl::Status Write(absl::string_view text) {
    return Write(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(text.data()), text.size()));
  }

  /// Waits until the file is on disk.
  absl::StatusOr<FileDigest> Finish() {
    if (fsync(descriptor_) != 0) return WriteError(path_, errno);
    LOGPROBD_ASSIGN_OR_RETURN(std::string sha256, sha256_.Hex());
    return FileDigest{num_bytes_, std::move(sha256)};
  }

 private:
  OutputFile(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  std::string path_;
  int descriptor_;
  int64_t num_bytes_ = 0;
  Sha256 sha256_;
};

absl::StatusOr<FileDigest> WriteFile(const std::string& path, absl::string_view text) {
  LOGPROBD_ASSIGN_OR_RETURN(const auto file, OutputFile::Create(path));
  LOGPROBD_RETURN_IF_ERROR(file->Write(text));
  return file->Finish();
}

/// A tensor of the new file.
struct NewTensor {
  std::string name;
  const StoredTensor* stored = nullptr;
  int64_t num_bytes() const { return stored->entry.file_end - stored->entry.file_begin; }
  // A bias [1, vocab] becomes [vocab].
  std::vector<int64_t> shape() const {
    const std::vector<int64_t>& shape = stored->entry.shape;
    const bool is_row = shape.size() == 2 && shape[0] == 1 && IsFinalLogitsBias(stored->entry.name);
    return is_row ? std::vector<int64_t>{shape[1]} : shape;
  }
};

/// Returns the tensors in the order that other writers of the format use, which aligns each of
/// them: by decreasing size of their elements, then by name.
std::vector<NewTensor> TensorsOf(const HeadSource& source) {
  const std::vector<std::string>& names = HeadRules::Get().head_names;
  const std::string& found = source.weight.entry.name;
  const bool keeps_name = std::find(names.begin(), names.end(), found) != names.end();
  const std::string name = keeps_name ? found : std::string(kDefaultTensor);
  std::vector<NewTensor> tensors = {{name, &source.weight}};
  if (source.bias.has_value()) tensors.push_back({BiasNameOf(name), &*source.bias});
  std::sort(tensors.begin(), tensors.end(), [](const NewTensor& a, const NewTensor& b) {
    const bool a_is_wide = a.stored->entry.dtype == "F32";
    const bool b_is_wide = b.stored->entry.dtype == "F32";
    return a_is_wide != b_is_wide ? a_is_wide : a.name < b.name;
  });
  return tensors;
}

std::string SafetensorsHeader(const std::vector<NewTensor>& tensors) {
  // Transformers only reads files with this format.
  nlohmann::ordered_json header = {{"__metadata__", {{"format", "pt"}}}};
  int64_t begin = 0;
  for (const NewTensor& tensor : tensors) {
    const int64_t end = begin + tensor.num_bytes();
    header[tensor.name] = {{"dtype", tensor.stored->entry.dtype},
                           {"shape", tensor.shape()},
                           {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string text = header.dump();
  constexpr size_t kAlignmentBytes = 8;
  text.resize((text.size() + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes, ' ');
  std::array<char, sizeof(uint64_t)> length{};
  const uint64_t num_bytes = text.size();
  std::memcpy(length.data(), &num_bytes, sizeof(num_bytes));  // the host is little-endian
  return absl::StrCat(absl::string_view(length.data(), length.size()), text);
}

/// Reads [begin, end) of a file in blocks and passes each to `use`, which returns a Status.
template <typename Use>
absl::Status ReadBlocks(const RegularFile& file, int64_t begin, int64_t end, const Use& use) {
  std::vector<std::byte> block(static_cast<size_t>(std::min(kBlockBytes, end - begin)));
  for (int64_t at = begin; at < end; at += kBlockBytes) {
    const auto part =
        absl::MakeSpan(block).first(static_cast<size_t>(std::min(kBlockBytes, end - at)));
    LOGPROBD_RETURN_IF_ERROR(file.Read(at, part));
    LOGPROBD_RETURN_IF_ERROR(use(absl::Span<const std::byte>(part)));
  }
  return absl::OkStatus();
}

std::string NameIn(const std::string& folder, const RegularFile& file) {
  return fs::path(file.path()).lexically_relative(folder).string();
}

absl::StatusOr<Json> HashSources(const HeadSource& source, const ExportProgress& progress) {
  Json entries = Json::object();
  for (const std::shared_ptr<RegularFile>& file : source.files) {
    const std::string name = NameIn(source.folder, *file);
    const std::string step = absl::StrCat("hashing ", name);
    Sha256 sha256;
    int64_t done = 0;
    LOGPROBD_RETURN_IF_ERROR(
        ReadBlocks(*file, 0, file->size_bytes(), [&](absl::Span<const std::byte> bytes) {
          progress(step, done, file->size_bytes());
          done += static_cast<int64_t>(bytes.size());
          sha256.Add(bytes);
          return absl::OkStatus();
        }));
    LOGPROBD_ASSIGN_OR_RETURN(std::string digest, sha256.Hex());
    entries[name] = FileEntry({file->size_bytes(), std::move(digest)});
  }
  return entries;
}

struct WrittenWeights {
  FileDigest file;
  std::string head_sha256;  ///< Digest of what was read, as in ContentCheck.
};

/// Copies the tensors of the head into a new file.
absl::StatusOr<WrittenWeights> WriteWeights(const std::string& path, const ModelFolderHead& head,
                                            const std::vector<NewTensor>& tensors,
                                            const ExportProgress& progress) {
  LOGPROBD_ASSIGN_OR_RETURN(const auto out, OutputFile::Create(path));
  LOGPROBD_RETURN_IF_ERROR(out->Write(SafetensorsHeader(tensors)));
  int64_t total = 0;
  for (const NewTensor& tensor : tensors) total += tensor.num_bytes();
  int64_t done = 0;
  Sha256 content;
  for (const NewTensor& tensor : tensors) {
    const TensorEntry& entry = tensor.stored->entry;
    const bool is_weight = tensor.stored == &head.source->weight;
    LOGPROBD_RETURN_IF_ERROR(ReadBlocks(*tensor.stored->file, entry.file_begin, entry.file_end,
                                        [&](absl::Span<const std::byte> bytes) {
                                          progress("copying", done, total);
                                          done += static_cast<int64_t>(bytes.size());
                                          if (is_weight) content.Add(bytes);
                                          return out->Write(bytes);
                                        }));
  }
  content.Add(head.weights->stored_bias());
  WrittenWeights written;
  LOGPROBD_ASSIGN_OR_RETURN(written.file, out->Finish());
  LOGPROBD_ASSIGN_OR_RETURN(written.head_sha256, content.Hex());
  return written;
}

Json TensorEntries(const HeadSource& source, const std::vector<NewTensor>& tensors) {
  Json entries = Json::object();
  for (const NewTensor& tensor : tensors) {
    const TensorEntry& stored = tensor.stored->entry;
    entries[tensor.name] = {
        {"dtype", stored.dtype},
        {"shape", stored.shape},
        {"source", stored.name},
        {"source_files", Json::array({NameIn(source.folder, *tensor.stored->file)})}};
  }
  return entries;
}

/// Checks that a server finds the same head in the written folder as in the model.
absl::Status CheckSame(const HeadInfo& model, const HeadInfo& written) {
  const bool is_same =
      model.model_type == written.model_type && model.hidden_size == written.hidden_size &&
      model.vocab_size == written.vocab_size && model.vocab_rows == written.vocab_rows &&
      model.dtype == written.dtype && model.has_bias == written.has_bias &&
      model.scale == written.scale && model.softcap == written.softcap;
  return is_same ? absl::OkStatus()
                 : absl::InternalError(absl::StrCat(
                       "the written head differs from the model's, which is a bug in logprobd: ",
                       DescribeHead(model), " became ", DescribeHead(written)));
}

}  // namespace

absl::StatusOr<HeadExport> ExportHead(const HeadExportOptions& options,
                                      const ExportProgress& progress) {
  LOGPROBD_ASSIGN_OR_RETURN(const std::string model, FindModel(options.model, HubCacheFolder()));
  auto opened = OpenModelFolder(model, {.head_tensor = options.head_tensor,
                                        .logits = {.ignored_keys = options.ignored_keys}});
  if (absl::StrContains(opened.status().message(), "--softcap") ||
      absl::StrContains(opened.status().message(), "--logit-scale")) {
    return absl::Status(
        opened.status().code(),
        absl::StrCat(opened.status().message(),
                     " (--softcap and --logit-scale are settings of the server: an export takes "
                     "--ignore-config-key alone, its head has no cap and no factor for that key, "
                     "and the server of the export needs the setting)"));
  }
  LOGPROBD_RETURN_IF_ERROR(opened.status());
  ModelFolderHead found = *std::move(opened);
  const HeadSource& source = *found.source;
  const HeadInfo& info = found.weights->info();
  const std::vector<NewTensor> tensors = TensorsOf(source);

  fs::path out = fs::path(options.out).lexically_normal();
  if (!out.has_filename()) {  // the path ends in a slash
    out = out.parent_path();
  }
  LOGPROBD_ASSIGN_OR_RETURN(const auto folder, StagedFolder::Create(out.string(), options.force));
  Json manifest = {{"format", 1}, {"logprobd_version", options.version}};
  LOGPROBD_ASSIGN_OR_RETURN(manifest["sources"], HashSources(source, progress));
  manifest["tensors"] = TensorEntries(source, tensors);
  LOGPROBD_ASSIGN_OR_RETURN(const WrittenWeights weights,
                            WriteWeights(folder->PathOf(kWeightsFile), found, tensors, progress));
  manifest["files"][std::string(kWeightsFile)] = FileEntry(weights.file);
  manifest["head_sha256"] = weights.head_sha256;
  LOGPROBD_ASSIGN_OR_RETURN(
      const std::string config,
      ConfigOfHead(source.config, info.hidden_size, info.vocab_size, options.ignored_keys));
  LOGPROBD_ASSIGN_OR_RETURN(const FileDigest config_file,
                            WriteFile(folder->PathOf(kConfigFile), config));
  manifest["files"][std::string(kConfigFile)] = FileEntry(config_file);

  LOGPROBD_ASSIGN_OR_RETURN(const ModelFolderHead written, OpenModelFolder(folder->path(), {}));
  LOGPROBD_RETURN_IF_ERROR(CheckSame(info, written.weights->info()));
  LOGPROBD_ASSIGN_OR_RETURN(
      const ContentCheck content,
      CheckContent(*written.weights, [&progress](int64_t done, int64_t total) {
        progress("checking", done, total);
        return true;
      }));
  if (content.sha256 != weights.head_sha256) {
    return absl::DataLossError(
        absl::StrCat(PrintableName(folder->path()), " does not contain what was written to it"));
  }
  // The name of a file may be any bytes, but JSON is UTF-8.
  const std::string text = manifest.dump(2, ' ', false, Json::error_handler_t::replace);
  LOGPROBD_RETURN_IF_ERROR(
      WriteFile(folder->PathOf(kManifestFile), absl::StrCat(text, "\n")).status());
  LOGPROBD_RETURN_IF_ERROR(folder->Publish());

  HeadExport result{written.weights->info(), content.sha256, std::move(found.warnings)};
  if (!content.nonfinite.empty()) {
    result.warnings.push_back(absl::StrCat("the head is not finite: ", content.nonfinite));
  }
  return result;
}

}  // namespace logprobd
