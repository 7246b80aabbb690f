#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/tensor_files/tensor.h"

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
class HeaderParser {
 public:
  explicit HeaderParser(absl::string_view text) : text_(text) {}

  std::optional<NpyHeader> Parse() {
    NpyHeader header;
    int keys_seen = 0;
    if (!Take("{")) return std::nullopt;
    while (!Take("}")) {
      const std::optional<std::string> key = TakeString();
      if (!key.has_value() || !Take(":")) return std::nullopt;
      int bit = 0;
      if (*key == "descr") {
        const std::optional<std::string> descr = TakeString();
        if (!descr.has_value()) return std::nullopt;
        header.descr = *descr;
        bit = 1;
      } else if (*key == "fortran_order") {
        header.fortran_order = Take("True");
        if (!header.fortran_order && !Take("False")) return std::nullopt;
        bit = 2;
      } else if (*key == "shape") {
        if (!TakeShape(&header.shape)) return std::nullopt;
        bit = 4;
      }
      if (bit == 0 || (keys_seen & bit) != 0) return std::nullopt;
      keys_seen |= bit;
      if (!Take(",")) {
        if (!Take("}")) return std::nullopt;
        break;
      }
    }
    SkipSpace();
    if (keys_seen != 7 || !text_.empty()) return std::nullopt;
    return header;
  }

 private:
  void SkipSpace() { text_ = absl::StripLeadingAsciiWhitespace(text_); }

  bool Take(absl::string_view token) {
    SkipSpace();
    return absl::ConsumePrefix(&text_, token);
  }

  std::optional<std::string> TakeString() {
    SkipSpace();
    if (text_.empty() || (text_[0] != '\'' && text_[0] != '"')) return std::nullopt;
    const size_t end = text_.find(text_[0], 1);
    if (end == absl::string_view::npos) return std::nullopt;
    std::string value(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    return value;
  }

  bool TakeShape(std::vector<int64_t>* shape) {
    if (!Take("(")) return false;
    while (!Take(")")) {
      SkipSpace();
      size_t digits = 0;
      while (digits < text_.size() &&
             absl::ascii_isdigit(static_cast<unsigned char>(text_[digits]))) {
        ++digits;
      }
      int64_t dimension = 0;
      if (!absl::SimpleAtoi(text_.substr(0, digits), &dimension)) return false;
      text_.remove_prefix(digits);
      shape->push_back(dimension);
      if (!Take(",")) return Take(")");
    }
    return true;
  }

  absl::string_view text_;
};

std::optional<ElementType> ToElementType(absl::string_view descr) {
  static constexpr std::pair<absl::string_view, ElementType> kTypes[] = {
      {"<f2", ElementType::kF16},
      {"<f4", ElementType::kF32},
      {"<f8", ElementType::kF64},
      {"<i4", ElementType::kI32},
      {"<i8", ElementType::kI64},
      {"|u1", ElementType::kU8},
      {"<u2", ElementType::kU16},
      {"<u4", ElementType::kU32},
      {"<u8", ElementType::kU64},
      // NumPy writes the bfloat16 of ml_dtypes as an opaque two-byte type.
      {"<V2", ElementType::kBf16},
      {"|V2", ElementType::kBf16}};
  for (const auto& [name, type] : kTypes) {
    if (name == descr) return type;
  }
  return std::nullopt;
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
      HeaderParser({reinterpret_cast<const char*>(bytes.data()), header_bytes}).Parse();
  if (!header.has_value()) return broken("the .npy header is malformed");
  bytes.remove_prefix(header_bytes);
  const std::optional<ElementType> type = ToElementType(header->descr);
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
