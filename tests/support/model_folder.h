#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/base/head_info.h"
#include "tests/support/temp_folder.h"

namespace logprobd::testing {

/// A tensor to write, with its dtype as safetensors spells it and its little-endian values.
struct FileTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

/// Makes a tensor of `values`, row-major, rounded to nearest even in `dtype`.
FileTensor MakeTensor(const std::string& name, Dtype dtype, const std::vector<int64_t>& shape,
                      const std::vector<float>& values);

/// Makes a tensor of normal values with standard deviation `stddev`. The same seed gives the same
/// tensor.
FileTensor MakeRandomTensor(const std::string& name, Dtype dtype, const std::vector<int64_t>& shape,
                            float stddev, uint32_t seed);

/// Makes a tensor of zeros of any dtype that fills whole bytes, for tests that read no values.
FileTensor MakeZeroTensor(const std::string& name, const std::string& dtype,
                          const std::vector<int64_t>& shape);

/// Returns the bytes of a safetensors file: length, header, and the data in the order of `tensors`.
std::string SafetensorsBytes(const std::vector<FileTensor>& tensors);

/// Returns the bytes of a file with the header `json`, valid or not, followed by `data`.
std::string SafetensorsBytesOf(absl::string_view json, absl::string_view data);

/// Returns the value of the element of type `dtype` at `bytes`.
float ElementAt(const std::byte* bytes, Dtype dtype);

/// A temporary model folder, which the destructor removes.
class ModelFolder {
 public:
  const std::string& path() const { return folder_.path(); }
  std::string PathOf(const std::string& file_name) const { return folder_.path(file_name); }

  /// Writes any file and creates the folders in its name.
  void WriteFile(const std::string& file_name, absl::string_view content) const {
    folder_.Write(file_name, {content.data(), content.size()});
  }
  void WriteConfig(absl::string_view json) const { WriteFile("config.json", json); }

  /// Writes a single model.safetensors.
  void WriteTensors(const std::vector<FileTensor>& tensors) const;

  /// Writes model-00001-of-0000N.safetensors, ... and their index.
  void WriteShards(const std::vector<std::vector<FileTensor>>& shards) const;

  /// Writes only the index with the given map from tensors to files.
  void WriteIndex(const std::map<std::string, std::string>& weight_map) const;

 private:
  const TempFolder folder_;
};

}  // namespace logprobd::testing
