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
#include "server/weights/safetensors_header.h"
#include "server/weights/safetensors_index.h"

namespace logprobd {

/// A tensor and the file that holds it.
struct StoredTensor {
  std::shared_ptr<RegularFile> file;
  TensorEntry entry;
};

/// Where a model's files lie.
struct ModelPaths {
  std::string folder;
  std::string weights;  ///< A .safetensors file or an index.
  bool indexed = false;
};

/// Finds the weights of a folder, or accepts the file that `path` names. NOT_FOUND,
/// PERMISSION_DENIED, INVALID_ARGUMENT, or UNIMPLEMENTED where only pickle or GGUF files are there.
absl::StatusOr<ModelPaths> FindModelPaths(const std::string& path);

/// The tensors of a checkpoint that a HeadNameFilter wants: one safetensors file, or several and
/// their index. Opens and checks a shard when a tensor in it is asked for. One thread.
class Checkpoint {
 public:
  /// `filter` and `roots` (null: files may lie anywhere) must outlive the Checkpoint.
  static absl::StatusOr<Checkpoint> Open(const ModelPaths& paths, HeadNameFilter& filter,
                                         const AllowedRoots* roots = nullptr);

  bool Has(absl::string_view name) const { return files_.contains(name); }

  /// NOT_FOUND: no such tensor or its shard is missing. INVALID_ARGUMENT: a malformed shard, or one
  /// that does not hold what the index says.
  absl::StatusOr<StoredTensor> Find(absl::string_view name);

 private:
  struct Shard {
    std::shared_ptr<RegularFile> file;
    SafetensorsHeader header;
  };

  Checkpoint(ModelPaths paths, HeadNameFilter& filter, const AllowedRoots* roots);
  absl::StatusOr<const Shard*> OpenShard(const std::string& file_name);

  ModelPaths paths_;
  HeadNameFilter* filter_;
  const AllowedRoots* roots_;
  WeightMap files_;  ///< Tensor -> shard, relative to the folder.
  absl::flat_hash_map<std::string, std::unique_ptr<Shard>> shards_;
};

}  // namespace logprobd
