#include "server/weights/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/tensor_files/tensor.h"
#include "server/base/errors.h"
#include "server/weights/regular_file.h"

namespace logprobd::client {

absl::StatusOr<Tensor> ReadSafetensors(const std::string& path, const std::string& tensor) {
  absl::StatusOr<std::shared_ptr<const MappedFile>> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  const absl::StatusOr<std::shared_ptr<RegularFile>> readable = RegularFile::Open(path);
  if (!readable.ok()) return readable.status();
  const absl::StatusOr<SafetensorsHeader> header =
      ReadSafetensorsHeader(**readable, [](absl::string_view) { return true; });
  if (!header.ok()) return WithContext(header.status(), path);
  const TensorEntry* const entry = header->Find(tensor);
  if (entry == nullptr) {
    const auto append_name = [](std::string* out, const TensorEntry& each) { *out += each.name; };
    return absl::NotFoundError(absl::StrCat(path, " has no tensor \"", tensor, "\"; it has: ",
                                            absl::StrJoin(header->tensors, ", ", append_name)));
  }
  const std::optional<ElementType> type = FindElement(&ElementInfo::safetensors, entry->dtype);
  if (!type.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", tensor, " has dtype ", entry->dtype,
                     ", which is not supported: use BF16, F16, F32 or integers"));
  }
  return Tensor{
      .name = absl::StrCat(path, ":", tensor),
      .type = *type,
      .shape = entry->shape,
      .data = (*file)->data().subspan(static_cast<size_t>(entry->file_begin),
                                      static_cast<size_t>(entry->file_end - entry->file_begin)),
      .owner = *std::move(file)};
}

}  // namespace logprobd::client
