#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/base/head_info.h"

namespace logprobd::testing {

/// A tensor to be written: dtype as safetensors spells it, little-endian values.
struct FileTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

/// `values`, row-major, rounded to nearest even in `dtype`.
FileTensor MakeTensor(const std::string& name, Dtype dtype, const std::vector<int64_t>& shape,
                      const std::vector<float>& values);

/// Values of standard deviation `stddev`; the same seed gives the same tensor.
FileTensor MakeRandomTensor(const std::string& name, Dtype dtype, const std::vector<int64_t>& shape,
                            float stddev, uint32_t seed);

/// A tensor of zeros of any dtype that fills whole bytes; for tests that read no values.
FileTensor MakeZeroTensor(const std::string& name, const std::string& dtype,
                          const std::vector<int64_t>& shape);

/// The bytes of a safetensors file: length, header, data, in the order given.
std::string SafetensorsBytes(const std::vector<FileTensor>& tensors);

/// The bytes of a file whose header is `json`, right or wrong, followed by `data`.
std::string SafetensorsBytesOf(absl::string_view json, absl::string_view data);

/// The value of a "bf16", "f16" or "f32" element at `bytes`.
float ElementAt(const std::byte* bytes, Dtype dtype);

/// A model folder of a test, removed at the end.
class ModelFolder {
 public:
  ModelFolder();
  ~ModelFolder();
  ModelFolder(const ModelFolder&) = delete;
  ModelFolder& operator=(const ModelFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string PathOf(const std::string& file_name) const;

  /// Writes any file; folders in its name are made.
  void WriteFile(const std::string& file_name, absl::string_view content) const;
  void WriteConfig(absl::string_view json) const { WriteFile("config.json", json); }

  /// One model.safetensors.
  void WriteTensors(const std::vector<FileTensor>& tensors) const;

  /// model-00001-of-0000N.safetensors, ... and their index.
  void WriteShards(const std::vector<std::vector<FileTensor>>& shards) const;

  /// Only the index, as the map says.
  void WriteIndex(const std::map<std::string, std::string>& weight_map) const;

 private:
  std::string path_;
};

}  // namespace logprobd::testing
