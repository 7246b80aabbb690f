// Reads arbitrary bytes as a safetensors file. The reader must refuse them or describe tensors that
// lie within the file.

#include <cstddef>
#include <cstdint>
#include <string>

#include "server/base/errors.h"
#include "server/weights/safetensors_header.h"
#include "server/weights/tensor_layout.h"
#include "tests/support/memory_bytes.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using logprobd::ReadSafetensorsHeader;
  using logprobd::TensorBytes;
  const logprobd::testing::MemoryBytes file(std::string(reinterpret_cast<const char*>(data), size));
  const auto header = ReadSafetensorsHeader(file, [](absl::string_view) { return true; });
  if (!header.ok()) {
    LOGPROBD_CHECK(absl::IsInvalidArgument(header.status()), header.status().ToString());
    LOGPROBD_CHECK(!header.status().message().empty());
    return 0;
  }
  int64_t bytes = 0;
  for (const logprobd::TensorEntry& tensor : header->tensors) {
    LOGPROBD_CHECK(tensor.file_begin >= 8 && tensor.file_begin <= tensor.file_end);
    LOGPROBD_CHECK(tensor.file_end <= file.size_bytes());
    const auto tensor_bytes = TensorBytes(tensor.dtype, tensor.shape);
    LOGPROBD_CHECK(tensor_bytes.ok() && *tensor_bytes == tensor.file_end - tensor.file_begin);
    bytes += *tensor_bytes;
  }
  LOGPROBD_CHECK(bytes <= file.size_bytes() - 8);
  return 0;
}
