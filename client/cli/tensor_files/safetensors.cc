#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/tensor_files/tensor.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {
namespace {

using Json = nlohmann::json;

// Limit of the reference implementation.
constexpr uint64_t kHeaderBytesMax = 100'000'000;

std::optional<ElementType> ToElementType(const std::string& dtype) {
  static constexpr std::pair<absl::string_view, ElementType> kTypes[] = {
      {"BF16", ElementType::kBf16}, {"F16", ElementType::kF16}, {"F32", ElementType::kF32},
      {"F64", ElementType::kF64},   {"I32", ElementType::kI32}, {"I64", ElementType::kI64},
      {"U8", ElementType::kU8},     {"U16", ElementType::kU16}, {"U32", ElementType::kU32},
      {"U64", ElementType::kU64}};
  for (const auto& [name, type] : kTypes) {
    if (name == dtype) return type;
  }
  return std::nullopt;
}

/// Parses the header. Returns nullopt if it is not JSON or a key occurs twice in one object.
std::optional<Json> ParseHeader(const char* text, size_t size) {
  std::vector<std::set<std::string>> names;
  bool has_duplicate = false;
  const auto watch = [&](int /*depth*/, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) {
      names.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      names.pop_back();
    } else if (event == Json::parse_event_t::key) {
      has_duplicate |= !names.back().insert(parsed.get<std::string>()).second;
    }
    return true;
  };
  Json header = Json::parse(text, text + size, watch, /*allow_exceptions=*/false);
  if (header.is_discarded() || has_duplicate || !header.is_object()) return std::nullopt;
  return header;
}

/// Returns the values of an array of non-negative integers, or nullopt.
std::optional<std::vector<int64_t>> ToSizes(const Json& json) {
  if (!json.is_array()) return std::nullopt;
  std::vector<int64_t> sizes;
  for (const Json& element : json) {
    if (!element.is_number_unsigned() || element.get<uint64_t>() > uint64_t{INT64_MAX}) {
      return std::nullopt;
    }
    sizes.push_back(element.get<int64_t>());
  }
  return sizes;
}

}  // namespace

absl::StatusOr<Tensor> ReadSafetensors(const std::string& path, const std::string& tensor) {
  absl::StatusOr<std::shared_ptr<const MappedFile>> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  const auto broken = [&path](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", what...));
  };
  absl::Span<const std::byte> bytes = (*file)->data();
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) return broken("not a safetensors file: too short");
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  bytes.remove_prefix(sizeof(header_bytes));
  if (header_bytes > kHeaderBytesMax || header_bytes > bytes.size()) {
    return broken("not a safetensors file: its header claims ", header_bytes, " bytes");
  }
  const std::optional<Json> header =
      ParseHeader(reinterpret_cast<const char*>(bytes.data()), header_bytes);
  if (!header.has_value()) return broken("the safetensors header is not valid JSON");
  bytes.remove_prefix(header_bytes);

  const auto found = header->find(tensor);
  if (found == header->end() || tensor == "__metadata__") {
    std::vector<std::string> names;
    for (const auto& [name, entry] : header->items()) {
      if (name != "__metadata__") names.push_back(name);
    }
    return absl::NotFoundError(absl::StrCat(path, " has no tensor \"", tensor,
                                            "\"; it has: ", absl::StrJoin(names, ", ")));
  }
  const Json& entry = *found;
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
      !entry.contains("shape") || !entry.contains("data_offsets")) {
    return broken("the entry of ", tensor, " has no dtype, shape or data_offsets");
  }
  const auto dtype = entry["dtype"].get<std::string>();
  const std::optional<ElementType> type = ToElementType(dtype);
  if (!type.has_value()) {
    return broken(tensor, " has dtype ", dtype,
                  ", which is not supported: use BF16, F16, F32 or integers");
  }
  const std::optional<std::vector<int64_t>> shape = ToSizes(entry["shape"]);
  const std::optional<std::vector<int64_t>> offsets = ToSizes(entry["data_offsets"]);
  if (!shape.has_value() || !offsets.has_value() || offsets->size() != 2) {
    return broken("shape or data_offsets of ", tensor, " are not lists of non-negative integers");
  }
  const int64_t begin = (*offsets)[0];
  const int64_t end = (*offsets)[1];
  if (begin > end || end > static_cast<int64_t>(bytes.size())) {
    return broken(tensor, " claims bytes ", begin, " to ", end, " of ", bytes.size(),
                  ": is the file truncated?");
  }
  const absl::StatusOr<int64_t> data_bytes = TensorBytes(*shape, *type);
  if (!data_bytes.ok()) return broken(tensor, ": ", data_bytes.status().message());
  if (end - begin != *data_bytes) {
    return broken(tensor, " has shape ", ShapeText(*shape), " of ", ElementName(*type),
                  ", which is ", *data_bytes, " bytes, but its data_offsets span ", end - begin,
                  " bytes");
  }
  return Tensor{.name = absl::StrCat(path, ":", tensor),
                .type = *type,
                .shape = *shape,
                .data = bytes.subspan(static_cast<size_t>(begin), static_cast<size_t>(*data_bytes)),
                .owner = *std::move(file)};
}

}  // namespace logprobd::client
