#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace logprobd::client {

/// Returns the bytes of `values` in memory.
template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

/// Returns the bytes of a version 1 .npy file.
inline std::string Npy(const std::string& header, const std::string& data) {
  std::string file("\x93NUMPY\x01\x00", 8);
  file.push_back(static_cast<char>(header.size() & 0xFF));
  file.push_back(static_cast<char>(header.size() >> 8));
  file.append(header);
  file.append(data);
  return file;
}

inline std::string NpyHeader(const std::string& descr, const std::string& shape) {
  std::string header = "{'descr': '";
  header.append(descr).append("', 'fortran_order': False, 'shape': ").append(shape).append(", }\n");
  return header;
}

/// Returns the bytes of a safetensors file with this header.
inline std::string Safetensors(const std::string& header, const std::string& data) {
  const uint64_t header_bytes = header.size();
  std::string file(sizeof(header_bytes), '\0');
  std::memcpy(file.data(), &header_bytes, sizeof(header_bytes));
  file.append(header);
  file.append(data);
  return file;
}

}  // namespace logprobd::client
