// libFuzzer entry that compares ParsePush with Protobuf. The first byte determines how the other
// bytes are split into pieces.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "tests/fuzz/push_parser_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) {
    return 0;
  }
  const auto difference = logprobd::testing::PushParserDifference(
      {reinterpret_cast<const char*>(data + 1), size - 1}, data[0]);
  if (difference.has_value()) {
    std::fprintf(stderr, "%s\n", difference->c_str());
    std::abort();
  }
  return 0;
}
