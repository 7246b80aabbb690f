#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// The folder in which huggingface_hub keeps downloaded models:
//
//   models--ORG--NAME/refs/main            the commit of the branch, as text
//   models--ORG--NAME/snapshots/COMMIT/    the files of that commit, which are links into
//   models--ORG--NAME/blobs/               their contents, which are files or links into
//   blobs/                                 the contents that several models share

namespace logprobd {

/// Returns huggingface_hub's cache folder, which these variables name, the first one that is set:
/// $HF_HUB_CACHE, $HUGGINGFACE_HUB_CACHE, $HF_HOME/hub, $XDG_CACHE_HOME/huggingface/hub,
/// $HOME/.cache/huggingface/hub. Returns an empty string if none is set.
std::string HubCacheFolder();

/// Returns the path of a model that an operator names. This is `model` itself, unless it has the
/// form ORG/NAME and no such path exists: then it is the snapshot of the model's main branch in
/// `cache_folder`. Returns NOT_FOUND, which says how to fetch the head's files, if there is none,
/// and INVALID_ARGUMENT if the cache is malformed.
absl::StatusOr<std::string> FindModel(const std::string& model, const std::string& cache_folder);

/// Returns "; fetch it with: hf download ..." for a file that is missing from `folder`, or an empty
/// string if `folder` is not a snapshot in a hub's cache. If `file` is empty, the command fetches
/// the weights or their index.
std::string HubDownloadHint(const std::string& folder, absl::string_view file);

/// Returns the folders that contain the files of all snapshots of the model to which `path`
/// belongs, or an empty vector if `path` is not in a hub's cache.
std::vector<std::string> HubFoldersOf(const std::string& path);

}  // namespace logprobd
