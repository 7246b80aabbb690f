#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd::client {

/// Element types of the arrays that this program reads.
enum class ElementType { kBf16, kF16, kF32, kF64, kI32, kI64, kU8, kU16, kU32, kU64 };

/// Size and names of an element type.
struct ElementInfo {
  ElementType type;
  int64_t bytes;
  absl::string_view name;         ///< In messages.
  absl::string_view safetensors;  ///< In safetensors headers.
  absl::string_view npy;          ///< In .npy headers.
};

/// The element types in the order of ElementType.
inline constexpr ElementInfo kElements[] = {
    // NumPy writes the bfloat16 of ml_dtypes as an opaque two-byte type.
    {ElementType::kBf16, 2, "bf16", "BF16", "<V2"}, {ElementType::kF16, 2, "f16", "F16", "<f2"},
    {ElementType::kF32, 4, "f32", "F32", "<f4"},    {ElementType::kF64, 8, "f64", "F64", "<f8"},
    {ElementType::kI32, 4, "int32", "I32", "<i4"},  {ElementType::kI64, 8, "int64", "I64", "<i8"},
    {ElementType::kU8, 1, "uint8", "U8", "|u1"},    {ElementType::kU16, 2, "uint16", "U16", "<u2"},
    {ElementType::kU32, 4, "uint32", "U32", "<u4"}, {ElementType::kU64, 8, "uint64", "U64", "<u8"},
};

constexpr int64_t ElementBytes(ElementType type) {
  return kElements[static_cast<size_t>(type)].bytes;
}
constexpr absl::string_view ElementName(ElementType type) {
  return kElements[static_cast<size_t>(type)].name;
}

/// Returns the type whose name in `member` of ElementInfo is `name`.
inline std::optional<ElementType> FindElement(absl::string_view ElementInfo::*member,
                                              absl::string_view name) {
  for (const ElementInfo& element : kElements) {
    if (element.*member == name) return element.type;
  }
  return std::nullopt;
}

/// A file mapped for reading. If the file is truncated while it is mapped, reading it ends the
/// process (SIGBUS).
class MappedFile {
 public:
  /// Maps a file. Returns NOT_FOUND, PERMISSION_DENIED or INVALID_ARGUMENT (for a folder), with the
  /// path in the message.
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  absl::Span<const std::byte> data() const { return data_; }

 private:
  explicit MappedFile(absl::Span<const std::byte> data) : data_(data) {}
  absl::Span<const std::byte> data_;
};

/// An array in a mapped file, row-major and little-endian.
struct Tensor {
  std::string name;  ///< Names the file and, in safetensors, the tensor; used in messages.
  ElementType type = ElementType::kF32;
  std::vector<int64_t> shape;
  absl::Span<const std::byte> data;   ///< May have any alignment.
  std::shared_ptr<const void> owner;  ///< Keeps `data` mapped.

  int64_t elements() const;
};

/// Maps a NumPy .npy file (format versions 1 to 3, C order, little-endian numbers, no pickled
/// objects). Returns INVALID_ARGUMENT if the file is malformed; the message says how.
absl::StatusOr<Tensor> ReadNpy(const std::string& path);

/// Writes a version 1 .npy file. `descr` is NumPy's name of the type, for example "<f4".
absl::Status WriteNpy(const std::string& path, absl::string_view descr,
                      absl::Span<const int64_t> shape, absl::Span<const std::byte> data);

/// Maps one tensor of a .safetensors file. Returns NOT_FOUND, with the names in the file, if there
/// is no such tensor. Returns the errors of server/weights/safetensors.h, whose reader checks the
/// header, with the path, and INVALID_ARGUMENT for a type that is not one of ElementType.
absl::StatusOr<Tensor> ReadSafetensors(const std::string& path, const std::string& tensor);

/// Returns a shape as text, for example "[3, 4]".
std::string ShapeText(absl::Span<const int64_t> shape);

/// Returns the product of `shape`, whose dimensions must be >= 0, and the element size. Returns
/// INVALID_ARGUMENT if it does not fit in 63 bits.
absl::StatusOr<int64_t> TensorBytes(absl::Span<const int64_t> shape, ElementType type);

/// Returns the integers of a tensor as int64. Returns INVALID_ARGUMENT unless it has one dimension
/// and an integer type.
absl::StatusOr<std::vector<int64_t>> ToInt64(const Tensor& tensor);

/// Returns the integers of a tensor as token ids. Returns INVALID_ARGUMENT like ToInt64, and for
/// ids that do not fit in int32.
absl::StatusOr<std::vector<int32_t>> ToTokenIds(const Tensor& tensor);

/// Returns the numbers of a tensor. Returns INVALID_ARGUMENT unless it has one dimension and type
/// f32 or f64.
absl::StatusOr<std::vector<float>> ToFloats(const Tensor& tensor);

}  // namespace logprobd::client
