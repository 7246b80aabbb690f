#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/weights/allowed_roots.h"
#include "server/weights/head_names.h"
#include "server/weights/regular_file.h"
#include "server/weights/safetensors.h"

namespace logprobd {

/// A tensor and the file that holds it.
struct StoredTensor {
  std::shared_ptr<RegularFile> file;
  TensorEntry entry;
};

/// The paths of a model's files.
struct ModelPaths {
  std::string folder;
  std::string weights;            ///< A .safetensors file or an index.
  bool indexed = false;           ///< True if `weights` is an index.
  std::string unused_index = "";  ///< An index beside the single file `weights`, or empty.
};

/// Finds the weights in a folder, or accepts the file that `path` names. Returns NOT_FOUND,
/// PERMISSION_DENIED or INVALID_ARGUMENT if there are no readable weights, and UNIMPLEMENTED if
/// there are only pickle or GGUF files. Unless `roots` is null, nothing outside of it is looked
/// into, even if a link takes the place of `path` meanwhile: PERMISSION_DENIED.
absl::StatusOr<ModelPaths> FindModelPaths(const std::string& path,
                                          const AllowedRoots* roots = nullptr);

/// The tensors of a checkpoint that HeadNames selects. The checkpoint is one safetensors
/// file, or several with an index. A shard is opened and checked when one of its tensors is
/// requested. Not thread-safe.
class Checkpoint {
 public:
  /// `names` and `roots` must outlive the Checkpoint. If `roots` is null, files may be anywhere.
  static absl::StatusOr<Checkpoint> Open(const ModelPaths& paths, HeadNames& names,
                                         const AllowedRoots* roots = nullptr);

  bool Has(absl::string_view name) const { return files_.contains(name); }

  /// Returns the index, or null if the checkpoint is a single file.
  const std::shared_ptr<RegularFile>& index() const { return index_; }

  /// Returns the tensors that names select and that an opened shard contains, although the index
  /// does not list them.
  const std::vector<std::string>& unlisted() const { return unlisted_; }

  /// Returns a tensor. Returns NOT_FOUND if its shard is missing, and INVALID_ARGUMENT if there is
  /// no such tensor, or if the shard is malformed or does not contain the tensor that the index
  /// places there.
  absl::StatusOr<StoredTensor> Find(absl::string_view name);

 private:
  struct Shard {
    std::shared_ptr<RegularFile> file;
    SafetensorsHeader header;
  };

  Checkpoint(ModelPaths paths, HeadNames& names, const AllowedRoots* roots);
  absl::StatusOr<const Shard*> OpenShard(const std::string& file_name);

  ModelPaths paths_;
  HeadNames* names_;
  const AllowedRoots* roots_;
  std::shared_ptr<RegularFile> index_;
  WeightMap files_;  ///< File name of each tensor's shard, relative to the folder.
  absl::flat_hash_map<std::string, std::unique_ptr<Shard>> shards_;
  std::vector<std::string> unlisted_;
};

}  // namespace logprobd
