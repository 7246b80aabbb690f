#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/bench/float_formats.h"
#include "client/cli/bench/random.h"
#include "client/cpp/server_info.h"
#include "nlohmann/json.hpp"
#include "tests/unit/client/cli/temp_folder.h"

namespace logprobd::client {

/// A tensor to be written into a safetensors file.
struct NamedTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

inline std::string SafetensorsOf(const std::vector<NamedTensor>& tensors) {
  nlohmann::json header;
  std::string data;
  for (const NamedTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  return Safetensors(header.dump(), data);
}

/// `values` as `dtype` has them.
inline std::string ElementsOf(const std::vector<float>& values, Dtype dtype) {
  std::string bytes(values.size() * static_cast<size_t>(DtypeBytes(dtype)), '\0');
  for (size_t i = 0; i < values.size(); ++i) {
    StoreElement(
        values[i], dtype,
        reinterpret_cast<std::byte*>(bytes.data()) + i * static_cast<size_t>(DtypeBytes(dtype)));
  }
  return bytes;
}

inline std::vector<float> RandomValues(size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values;
  for (size_t i = 0; i < count; ++i) values.push_back(random.Normal());
  return values;
}

/// A head of 8 elements whose weight has 128 rows, 100 of them valid.
inline Head CaseHead() {
  Head head;
  head.tensor = "lm_head.weight";
  head.vocab_size = 100;
  head.vocab_rows = 128;
  head.hidden_size = 8;
  head.dtype = Dtype::kBf16;
  return head;
}

inline NamedTensor CaseWeight(const std::vector<float>& values) {
  return {.name = "lm_head.weight",
          .dtype = "BF16",
          .shape = {128, 8},
          .bytes = ElementsOf(values, Dtype::kBf16)};
}

}  // namespace logprobd::client
