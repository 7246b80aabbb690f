#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd::client {

/// Element types that these files may hold and this program has a use for.
enum class ElementType { kBf16, kF16, kF32, kF64, kI32, kI64, kU8, kU16, kU32, kU64 };

int64_t ElementBytes(ElementType type);
absl::string_view ElementName(ElementType type);

/// An array in a file, row-major and little-endian, mapped and not copied.
struct Tensor {
  std::string name;  ///< File and, in safetensors, tensor: for messages.
  ElementType type = ElementType::kF32;
  std::vector<int64_t> shape;
  absl::Span<const std::byte> data;  ///< Any alignment.
  std::shared_ptr<const void> owner;

  int64_t elements() const;
};

/// "[3, 4]"
std::string ShapeText(absl::Span<const int64_t> shape);

/// Product of `shape` times the element's size. INVALID_ARGUMENT when a dimension is negative or
/// the product does not fit in 63 bits.
absl::StatusOr<int64_t> TensorBytes(absl::Span<const int64_t> shape, ElementType type);

/// The tensor's integers, widened. INVALID_ARGUMENT unless it has one dimension and an integer
/// type.
absl::StatusOr<std::vector<int64_t>> ToInt64(const Tensor& tensor);

/// As ToInt64, each within int32: token ids.
absl::StatusOr<std::vector<int32_t>> ToTokenIds(const Tensor& tensor);

/// The tensor's numbers. INVALID_ARGUMENT unless it has one dimension and type f32 or f64.
absl::StatusOr<std::vector<float>> ToFloats(const Tensor& tensor);

}  // namespace logprobd::client
