#include "server/weights/tensor_layout.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "server/weights/printable_name.h"

namespace logprobd {
namespace {

struct DtypeBits {
  absl::string_view name;
  int64_t bits;
};

constexpr std::array<DtypeBits, 22> kDtypes = {{
    {"BOOL", 8}, {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},   {"F8_E5M2", 8},     {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"I16", 16}, {"F8_E5M2FNUZ", 8}, {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32}, {"U32", 32},        {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64}, {"U64", 64},
}};

}  // namespace

absl::StatusOr<int64_t> TensorBytes(absl::string_view dtype, const std::vector<int64_t>& shape) {
  const auto* known = std::find_if(kDtypes.begin(), kDtypes.end(),
                                   [dtype](const DtypeBits& d) { return d.name == dtype; });
  if (known == kDtypes.end()) {
    return absl::InvalidArgumentError(absl::StrCat("unknown dtype ", PrintableName(dtype)));
  }
  int64_t bits = 1;
  for (const int64_t dimension : shape) {
    if (__builtin_mul_overflow(bits, dimension, &bits)) {
      return absl::InvalidArgumentError("its shape has more than 2^63 elements");
    }
  }
  if (__builtin_mul_overflow(bits, known->bits, &bits)) {
    return absl::InvalidArgumentError("its shape has more than 2^63 bits");
  }
  if (bits % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("its ", bits, " bits of ", dtype, " do not fill whole bytes"));
  }
  return bits / 8;
}

absl::Status CheckSpans(std::vector<std::pair<int64_t, int64_t>>& spans, int64_t data_bytes) {
  std::sort(spans.begin(), spans.end());
  int64_t expected = 0;
  for (const auto& [begin, end] : spans) {
    if (begin != expected) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensors ", begin < expected ? "overlap" : "leave a hole", ": one begins at byte ", begin,
          " of the data, where ", expected, " is due"));
    }
    expected = end;
  }
  if (expected > data_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the file is cut short: its tensors need ",
                                                   expected, " bytes after the header, it has ",
                                                   data_bytes, "; download it again"));
  }
  if (expected < data_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the file goes on for ", data_bytes - expected,
                                                   " bytes after its last tensor"));
  }
  return absl::OkStatus();
}

}  // namespace logprobd
