#include "client/cli/tensor_files/tensor.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace logprobd::client {
namespace {

template <typename From, typename To>
std::vector<To> Convert(const Tensor& tensor) {
  std::vector<To> values;
  values.reserve(tensor.data.size() / sizeof(From));
  for (size_t offset = 0; offset < tensor.data.size(); offset += sizeof(From)) {
    From value;  // the element in the file may have any alignment
    std::memcpy(&value, tensor.data.data() + offset, sizeof(From));
    values.push_back(static_cast<To>(value));
  }
  return values;
}

absl::Status CheckOneDimension(const Tensor& tensor) {
  if (tensor.shape.size() == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      tensor.name, " has shape ", ShapeText(tensor.shape), ", must have one dimension"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const MappedFile>> MappedFile::Open(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  const absl::Cleanup close_it = [descriptor] { close(descriptor); };
  struct stat info = {};
  if (fstat(descriptor, &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  const auto size = static_cast<size_t>(info.st_size);
  if (size == 0) return std::shared_ptr<const MappedFile>(new MappedFile({}));
  void* const memory = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (memory == MAP_FAILED) return absl::ErrnoToStatus(errno, absl::StrCat("cannot map ", path));
  return std::shared_ptr<const MappedFile>(
      new MappedFile({static_cast<const std::byte*>(memory), size}));
}

MappedFile::~MappedFile() {
  if (!data_.empty()) munmap(const_cast<std::byte*>(data_.data()), data_.size());
}

int64_t Tensor::elements() const { return static_cast<int64_t>(data.size()) / ElementBytes(type); }

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<int64_t> TensorBytes(absl::Span<const int64_t> shape, ElementType type) {
  int64_t bytes = ElementBytes(type);
  for (const int64_t dimension : shape) {
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape ", ShapeText(shape), " has more than 2^63 - 1 bytes"));
    }
  }
  return bytes;
}

absl::StatusOr<std::vector<int64_t>> ToInt64(const Tensor& tensor) {
  if (absl::Status status = CheckOneDimension(tensor); !status.ok()) return status;
  switch (tensor.type) {
    case ElementType::kI32:
      return Convert<int32_t, int64_t>(tensor);
    case ElementType::kI64:
      return Convert<int64_t, int64_t>(tensor);
    case ElementType::kU8:
      return Convert<uint8_t, int64_t>(tensor);
    case ElementType::kU16:
      return Convert<uint16_t, int64_t>(tensor);
    case ElementType::kU32:
      return Convert<uint32_t, int64_t>(tensor);
    case ElementType::kU64:
      // Values above int64 become negative here; the check of the range rejects them later.
      return Convert<uint64_t, int64_t>(tensor);
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          tensor.name, " holds ", ElementName(tensor.type), ", must hold int32 or int64"));
  }
}

absl::StatusOr<std::vector<int32_t>> ToTokenIds(const Tensor& tensor) {
  absl::StatusOr<std::vector<int64_t>> wide = ToInt64(tensor);
  if (!wide.ok()) return wide.status();
  std::vector<int32_t> ids;
  ids.reserve(wide->size());
  for (size_t i = 0; i < wide->size(); ++i) {
    const int64_t id = (*wide)[i];
    if (id < std::numeric_limits<int32_t>::min() || id > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(
          absl::StrCat(tensor.name, "[", i, "] is ", id, ", must fit in int32"));
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

absl::StatusOr<std::vector<float>> ToFloats(const Tensor& tensor) {
  if (absl::Status status = CheckOneDimension(tensor); !status.ok()) return status;
  if (tensor.type == ElementType::kF32) return Convert<float, float>(tensor);
  if (tensor.type == ElementType::kF64) return Convert<double, float>(tensor);
  return absl::InvalidArgumentError(
      absl::StrCat(tensor.name, " holds ", ElementName(tensor.type), ", must hold float32"));
}

}  // namespace logprobd::client
