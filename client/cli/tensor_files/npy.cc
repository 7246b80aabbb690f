#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "client/cli/tensor_files/tensor.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {
namespace {

constexpr absl::string_view kMagic("\x93NUMPY", 6);

struct NpyHeader {
  std::string descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;
};

/// Parses the header's Python dictionary, which must have exactly the keys that NumPy writes:
/// descr, fortran_order and shape.
std::optional<NpyHeader> ParseHeader(absl::string_view text) {
  // What only JSON has must not be taken for Python.
  for (const absl::string_view json_only : {"[", "]", "\\", "true", "false", "null"}) {
    if (absl::StrContains(text, json_only)) return std::nullopt;
  }
  // As JSON it has other quotes, booleans and brackets, and no comma at the end of a list.
  const std::string json = absl::StrReplaceAll(text, {{"'", "\""},
                                                      {"True", "true"},
                                                      {"False", "false"},
                                                      {"(", "["},
                                                      {")", "]"},
                                                      {",)", "]"},
                                                      {", )", "]"},
                                                      {",}", "}"},
                                                      {", }", "}"}});
  int keys = 0;  // also those that occur twice, of which the parser keeps the last
  const auto count = [&keys](int /*depth*/, nlohmann::json::parse_event_t event,
                             nlohmann::json& /*parsed*/) {
    if (event == nlohmann::json::parse_event_t::key) ++keys;
    return true;
  };
  auto parsed = nlohmann::json::parse(json, count, /*allow_exceptions=*/false);
  // A key that is missing is null.
  if (!parsed.is_object() || keys != 3 || parsed.size() != 3 || !parsed["descr"].is_string() ||
      !parsed["fortran_order"].is_boolean() || !parsed["shape"].is_array()) {
    return std::nullopt;
  }
  NpyHeader header = {
      .descr = parsed["descr"], .fortran_order = parsed["fortran_order"], .shape = {}};
  for (const auto& dimension : parsed["shape"]) {
    if (!dimension.is_number_unsigned() || dimension > uint64_t{INT64_MAX}) return std::nullopt;
    header.shape.push_back(dimension);
  }
  return header;
}

uint32_t LittleEndian(absl::Span<const std::byte> bytes) {
  uint32_t value = 0;
  for (size_t i = bytes.size(); i > 0; --i) {
    value = value << 8 | std::to_integer<uint32_t>(bytes[i - 1]);
  }
  return value;
}

}  // namespace

absl::StatusOr<Tensor> ReadNpy(const std::string& path) {
  absl::StatusOr<std::shared_ptr<const MappedFile>> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  const auto broken = [&path](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", what...));
  };
  absl::Span<const std::byte> bytes = (*file)->data();
  if (bytes.size() < 10 || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    return broken("this is not a .npy file");
  }
  const auto version = std::to_integer<int>(bytes[6]);
  if (version < 1 || version > 3) return broken("unknown .npy version ", version);
  const size_t length_bytes = version == 1 ? 2 : 4;
  if (bytes.size() < 8 + length_bytes) return broken("the file ends inside its header");
  const size_t header_bytes = LittleEndian(bytes.subspan(8, length_bytes));
  bytes.remove_prefix(8 + length_bytes);
  if (bytes.size() < header_bytes) return broken("the file ends inside its header");

  const std::optional<NpyHeader> header =
      ParseHeader({reinterpret_cast<const char*>(bytes.data()), header_bytes});
  if (!header.has_value()) return broken("the .npy header is malformed");
  bytes.remove_prefix(header_bytes);
  const std::optional<ElementType> type =
      FindElement(&ElementInfo::npy, header->descr == "|V2" ? "<V2" : header->descr);
  if (!type.has_value()) {
    return broken("type ", header->descr,
                  " is not supported: save little-endian float16, float32, "
                  "int32, int64, or bfloat16 as uint16");
  }
  if (header->fortran_order && header->shape.size() > 1) {
    return broken("the array is in Fortran order: save numpy.ascontiguousarray(array)");
  }
  const absl::StatusOr<int64_t> data_bytes = TensorBytes(header->shape, *type);
  if (!data_bytes.ok()) return broken(data_bytes.status().message());
  if (static_cast<int64_t>(bytes.size()) != *data_bytes) {
    return broken("shape ", ShapeText(header->shape), " of ", ElementName(*type), " needs ",
                  *data_bytes, " bytes of data, but the file has ", bytes.size());
  }
  return Tensor{.name = path,
                .type = *type,
                .shape = header->shape,
                .data = bytes,
                .owner = *std::move(file)};
}

absl::Status WriteNpy(const std::string& path, absl::string_view descr,
                      absl::Span<const int64_t> shape, absl::Span<const std::byte> data) {
  std::string header =
      absl::StrCat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (",
                   absl::StrJoin(shape, ", "), shape.size() == 1 ? ",), }" : "), }");
  // The format requires the data to start at a multiple of 64 bytes, after a newline.
  constexpr size_t kPreambleBytes = 10;
  const size_t padding = 63 - (kPreambleBytes + header.size()) % 64;
  header.append(padding, ' ');
  header.push_back('\n');

  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  if (!file) return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
  file.write(kMagic.data(), static_cast<std::streamsize>(kMagic.size()));
  const char preamble[] = {1, 0, static_cast<char>(header.size() & 0xFF),
                           static_cast<char>(header.size() >> 8)};
  file.write(preamble, sizeof(preamble));
  file.write(header.data(), static_cast<std::streamsize>(header.size()));
  file.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
  file.close();
  if (!file) return absl::DataLossError(absl::StrCat("cannot write ", path, ": is the disk full?"));
  return absl::OkStatus();
}

}  // namespace logprobd::client
