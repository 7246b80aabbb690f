// Parses arbitrary bytes as config.json and as an index. Both parsers must refuse them or return
// valid values.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/weights/head_config.h"
#include "server/weights/safetensors_index.h"
#include "tests/support/memory_bytes.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto config = logprobd::ParseHeadConfig(text);
  if (config.ok()) {
    LOGPROBD_CHECK(std::isfinite(config->scale) && config->scale > 0);
    LOGPROBD_CHECK(std::isfinite(config->softcap) && config->softcap >= 0);
    LOGPROBD_CHECK(config->hidden_size.value_or(1) >= 1 && config->vocab_size.value_or(1) >= 1);
  }
  const auto index = logprobd::ReadSafetensorsIndex(logprobd::testing::MemoryBytes(text),
                                                    [](absl::string_view) { return true; });
  if (index.ok()) {
    for (const auto& [tensor, file] : *index) {
      const std::filesystem::path path = std::filesystem::path(file).lexically_normal();
      LOGPROBD_CHECK(path.is_relative() && !path.empty() && *path.begin() != "..", file);
    }
  }
  return 0;
}
