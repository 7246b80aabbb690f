#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/head_info.h"

namespace logprobd {

/// The head to export, and the folder to write.
struct HeadExportOptions {
  std::string model = "";  ///< Folder, .safetensors file, index, or Hugging Face id (FindModel).
  std::string out = "";    ///< Folder to write. Its parent must exist.
  std::string head_tensor = "";                ///< As in ModelFolderOptions.
  std::vector<std::string> ignored_keys = {};  ///< As in LogitOverrides; they are not written.
  bool force = false;                          ///< Replace `out` if an export has written it.
  std::string version = "";                    ///< Version of logprobd, for the manifest.
};

/// An exported head.
struct HeadExport {
  HeadInfo head;                      ///< As a server finds it in the written folder.
  std::string sha256;                 ///< Digest of the head as in ContentCheck.
  std::vector<std::string> warnings;  ///< For the user, about the model and its values.
};

/// Is told what the export does ("hashing model.safetensors") and how far it is; never empty.
using ExportProgress =
    std::function<void(absl::string_view step, int64_t done_bytes, int64_t total_bytes)>;

/// Writes a model folder that contains the head of `options.model` alone: model.safetensors with
/// the weight, padding included, and the bias; config.json with the keys that describe the head;
/// and manifest.json, which README.md of this folder describes. A server finds the same head in it,
/// with the same digest and scores. The same input gives the same bytes.
///
/// The folder is written under a temporary name next to `out`, read back and checked, and then
/// renamed; a failure leaves `out` as it was. Returns ALREADY_EXISTS if `out` is not empty and
/// `force` is not set, FAILED_PRECONDITION if `force` would delete files that no export has
/// written, the errors of FindModel and OpenModelFolder, DATA_LOSS if files change or cannot be
/// read, and UNAVAILABLE if the folder cannot be written.
absl::StatusOr<HeadExport> ExportHead(const HeadExportOptions& options,
                                      const ExportProgress& progress);

}  // namespace logprobd
