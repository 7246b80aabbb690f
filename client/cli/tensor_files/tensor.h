#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd::client {

/// Element types of the arrays that this program reads.
enum class ElementType { kBf16, kF16, kF32, kF64, kI32, kI64, kU8, kU16, kU32, kU64 };

int64_t ElementBytes(ElementType type);
absl::string_view ElementName(ElementType type);

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
/// is no such tensor. Returns INVALID_ARGUMENT if the file is malformed: the header's length or
/// JSON is wrong, a name occurs twice, or a range lies outside the data or does not match the
/// shape.
absl::StatusOr<Tensor> ReadSafetensors(const std::string& path, const std::string& tensor);

/// Returns a shape as text, for example "[3, 4]".
std::string ShapeText(absl::Span<const int64_t> shape);

/// Returns the product of `shape` and the element size. Returns INVALID_ARGUMENT if a dimension is
/// negative or the product does not fit in 63 bits.
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
