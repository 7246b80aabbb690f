#include "server/weights/head_bias.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/weights/head_names.h"
#include "server/weights/printable_name.h"
#include "server/weights/tensor_dtype.h"

namespace logprobd {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

float FromBf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

float FromF16(uint16_t bits) {
  const float sign = (bits & 0x8000U) != 0 ? -1.0F : 1.0F;
  const int exponent = (bits >> 10) & 0x1F;
  const auto mantissa = static_cast<float>(bits & 0x3FFU);
  if (exponent == 0x1F) {
    return mantissa == 0 ? sign * std::numeric_limits<float>::infinity()
                         : std::numeric_limits<float>::quiet_NaN();
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -24)
                       : sign * std::ldexp(mantissa + 1024.0F, exponent - 25);
}

std::vector<float> Widen(absl::Span<const std::byte> bytes, Dtype dtype) {
  const auto element_bytes = static_cast<size_t>(DtypeBytes(dtype));
  std::vector<float> values(bytes.size() / element_bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == Dtype::kF32) {
      std::memcpy(&values[i], &bytes[i * element_bytes], sizeof(float));
    } else {
      uint16_t bits = 0;
      std::memcpy(&bits, &bytes[i * element_bytes], sizeof(bits));
      values[i] = dtype == Dtype::kBf16 ? FromBf16(bits) : FromF16(bits);
    }
  }
  return values;
}

std::string FindBias(const Checkpoint& checkpoint, const std::string& weight_name) {
  if (std::string sibling = BiasNameOf(weight_name); checkpoint.Has(sibling)) {
    return sibling;
  }
  // An embedding has no bias of its own; the head that it serves as may.
  const auto embeddings = EmbeddingTensorNames();
  if (std::find(embeddings.begin(), embeddings.end(), weight_name) != embeddings.end()) {
    for (const absl::string_view head : HeadTensorNames()) {
      if (std::string name = BiasNameOf(head); checkpoint.Has(name)) {
        return name;
      }
    }
  }
  return "";
}

}  // namespace

absl::StatusOr<HeadBias> ReadHeadBias(Checkpoint& checkpoint, const HeadConfig& config,
                                      const std::string& weight_name, int64_t rows) {
  HeadBias result;
  const std::string name = FindBias(checkpoint, weight_name);
  if (name.empty()) {
    if (config.has_bias.value_or(false)) {
      return absl::InvalidArgumentError(
          absl::StrCat("config.json says lm_head_bias, but the checkpoint has no bias for ",
                       PrintableName(weight_name), "; set lm_head_bias to false if it has none"));
    }
    return result;
  }
  if (!config.has_bias.value_or(true)) {
    result.warnings.push_back(absl::StrCat("config.json says that the head has no bias; ",
                                           PrintableName(name), " is ignored"));
    return result;
  }
  LOGPROBD_ASSIGN_OR_RETURN(const StoredTensor bias, checkpoint.Find(name));
  if (bias.entry.shape != std::vector<int64_t>{rows}) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", PrintableName(name), " has the shape [",
                     absl::StrJoin(bias.entry.shape, ", "), "], the head needs [", rows, "]"));
  }
  const std::optional<Dtype> dtype = ServedDtype(bias.entry.dtype);
  if (!dtype.has_value()) {
    return absl::UnimplementedError(absl::StrCat("tensor ", PrintableName(name), " is ",
                                                 bias.entry.dtype,
                                                 "; store the bias as F32, BF16 or F16"));
  }
  std::vector<std::byte> bytes(static_cast<size_t>(bias.entry.file_end - bias.entry.file_begin));
  LOGPROBD_RETURN_IF_ERROR(bias.file->Read(bias.entry.file_begin, absl::MakeSpan(bytes)));
  result.values = Widen(bytes, *dtype);
  result.stored = std::move(bytes);
  return result;
}

}  // namespace logprobd
