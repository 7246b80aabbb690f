#include "tests/support/model_folder.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/base/errors.h"
#include "tests/support/half_floats.h"

namespace logprobd::testing {
namespace {

float FromF16(uint16_t bits) {
  const float sign = (bits & 0x8000U) != 0 ? -1.0F : 1.0F;
  const int exponent = (bits >> 10) & 0x1F;
  const auto mantissa = static_cast<float>(bits & 0x3FFU);
  if (exponent == 0x1F) {
    return mantissa == 0 ? sign * INFINITY : NAN;
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -24)
                       : sign * std::ldexp(mantissa + 1024.0F, exponent - 25);
}

int64_t ElementBytes(const std::string& dtype) {
  const int64_t bits = std::strtol(dtype.c_str() + dtype.find_first_of("0123456789"), nullptr, 10);
  return dtype == "BOOL" ? 1 : bits / 8;
}

int64_t NumElements(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t dimension : shape) {
    product *= dimension;
  }
  return product;
}

}  // namespace

FileTensor MakeTensor(const std::string& name, Dtype dtype, const std::vector<int64_t>& shape,
                      const std::vector<float>& values) {
  LOGPROBD_CHECK(static_cast<int64_t>(values.size()) == NumElements(shape), name);
  const auto element_bytes = static_cast<size_t>(DtypeBytes(dtype));
  FileTensor tensor{name,
                    dtype == Dtype::kF32   ? "F32"
                    : dtype == Dtype::kF16 ? "F16"
                                           : "BF16",
                    shape, std::string(values.size() * element_bytes, '\0')};
  for (size_t i = 0; i < values.size(); ++i) {
    char* to = tensor.bytes.data() + i * element_bytes;
    if (dtype == Dtype::kF32) {
      std::memcpy(to, &values[i], sizeof(float));
    } else {
      const uint16_t bits = dtype == Dtype::kF16 ? ToF16(values[i]) : ToBf16(values[i]);
      std::memcpy(to, &bits, sizeof(bits));
    }
  }
  return tensor;
}

FileTensor MakeRandomTensor(const std::string& name, Dtype dtype, const std::vector<int64_t>& shape,
                            float stddev, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, stddev);
  std::vector<float> values(static_cast<size_t>(NumElements(shape)));
  for (float& value : values) {
    value = normal(random);
  }
  return MakeTensor(name, dtype, shape, values);
}

FileTensor MakeZeroTensor(const std::string& name, const std::string& dtype,
                          const std::vector<int64_t>& shape) {
  const int64_t bytes = NumElements(shape) * ElementBytes(dtype);
  return {name, dtype, shape, std::string(static_cast<size_t>(bytes), '\0')};
}

std::string SafetensorsBytesOf(absl::string_view json, absl::string_view data) {
  std::string length;
  for (int i = 0; i < 8; ++i) {
    length.push_back(static_cast<char>((json.size() >> (8 * i)) & 0xFFU));
  }
  return absl::StrCat(length, json, data);
}

std::string SafetensorsBytes(const std::vector<FileTensor>& tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  header["__metadata__"] = {{"format", "pt"}};
  std::string data;
  for (const FileTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  std::string json = header.dump();
  json.resize((json.size() + 7) / 8 * 8, ' ');
  return SafetensorsBytesOf(json, data);
}

float ElementAt(const std::byte* bytes, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    float value = 0;
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof(bits));
  return dtype == Dtype::kF16 ? FromF16(bits)
                              : std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

void ModelFolder::WriteTensors(const std::vector<FileTensor>& tensors) const {
  WriteFile("model.safetensors", SafetensorsBytes(tensors));
}

void ModelFolder::WriteShards(const std::vector<std::vector<FileTensor>>& shards) const {
  std::map<std::string, std::string> weight_map;
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    const std::string name =
        absl::StrFormat("model-%05d-of-%05d.safetensors", shard + 1, shards.size());
    WriteFile(name, SafetensorsBytes(shards[shard]));
    for (const FileTensor& tensor : shards[shard]) {
      weight_map[tensor.name] = name;
    }
  }
  WriteIndex(weight_map);
}

void ModelFolder::WriteIndex(const std::map<std::string, std::string>& weight_map) const {
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", 0}}},
                                        {"weight_map", weight_map}};
  WriteFile("model.safetensors.index.json", index.dump(2));
}

}  // namespace logprobd::testing
