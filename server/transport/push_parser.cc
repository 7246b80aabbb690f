#include "server/transport/push_parser.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/transport/grpc_message.h"
#include "server/transport/wire_reader.h"

namespace logprobd {
namespace {

absl::Status Malformed() {
  return absl::InvalidArgumentError("the bytes are not a well-formed PushWeightsRequest");
}

absl::Status BadNumber() {
  return absl::InvalidArgumentError(
      "PushWeightsRequest: a tag or a number is truncated, or has more than 64 bits, or begins a "
      "group");
}

/// What stands before the bytes of a field.
struct Field {
  uint32_t number = 0;
  WireType type = WireType::kVarint;
  uint64_t value = 0;  ///< The value of kVarint, the size of kBytes.
  /// Returns whether the field has this number and the type of a message or of bytes.
  bool Is(int known) const {
    return number == static_cast<uint32_t>(known) && type == WireType::kBytes;
  }
};

class Parser {
 public:
  explicit Parser(absl::Span<const PieceReader::Piece> pieces) : reader_(pieces) {}

  absl::StatusOr<ParsedPush> Parse() && {
    while (!reader_.AtEnd()) {
      LOGPROBD_ASSIGN_OR_RETURN(const Field field, ReadField(reader_.remaining()));
      const bool is_header = field.Is(v1::PushWeightsRequest::kHeaderFieldNumber);
      if (!is_header && !field.Is(v1::PushWeightsRequest::kRowsFieldNumber)) {
        std::string unknown;
        LOGPROBD_RETURN_IF_ERROR(CopyValue(field, unknown));
        continue;
      }
      if (parsed_.message.kind_case() != v1::PushWeightsRequest::KIND_NOT_SET) {
        return absl::InvalidArgumentError(
            "header, rows: more than one is given, must be one in each message");
      }
      std::string text;
      LOGPROBD_RETURN_IF_ERROR(is_header ? CopyBytes(field.value, text)
                                         : CopyRows(field.value, text));
      const bool is_valid = is_header ? parsed_.message.mutable_header()->ParseFromString(text)
                                      : parsed_.message.mutable_rows()->ParseFromString(text);
      if (!is_valid) return Malformed();
    }
    return std::move(parsed_);
  }

 private:
  /// Reads a field up to its bytes, of which at most `bytes_left` belong to its message.
  absl::StatusOr<Field> ReadField(int64_t bytes_left) {
    const int64_t end = reader_.position() + bytes_left;
    Field field;
    uint64_t tag = 0;
    if (!reader_.ReadVarint(kTagBytesMax, tag) || tag > std::numeric_limits<uint32_t>::max() ||
        tag >> 3 == 0) {
      return BadNumber();
    }
    field.number = static_cast<uint32_t>(tag >> 3);
    field.type = static_cast<WireType>(tag & 7);
    switch (field.type) {
      case WireType::kVarint:
        if (!reader_.ReadVarint(kVarintBytesMax, field.value)) return BadNumber();
        break;
      case WireType::kBytes:
        if (!reader_.ReadVarint(kLengthBytesMax, field.value)) return BadNumber();
        break;
      case WireType::kFixed32:
      case WireType::kFixed64:
        field.value = field.type == WireType::kFixed32 ? 4 : 8;
        break;
      default:
        return BadNumber();
    }
    const int64_t left = end - reader_.position();
    const bool has_bytes = field.type != WireType::kVarint;
    const bool fits = left >= 0 && (!has_bytes || field.value <= static_cast<uint64_t>(left));
    return fits ? absl::StatusOr<Field>(field) : Malformed();
  }

  /// Copies the fields of PushedRows, which has `size` bytes, except `data`.
  absl::Status CopyRows(uint64_t size, std::string& text) {
    const int64_t end = reader_.position() + static_cast<int64_t>(size);
    while (reader_.position() < end) {
      LOGPROBD_ASSIGN_OR_RETURN(const Field field, ReadField(end - reader_.position()));
      if (!field.Is(v1::PushedRows::kDataFieldNumber)) {
        LOGPROBD_RETURN_IF_ERROR(CopyValue(field, text));
      } else if (std::exchange(has_data_, true)) {
        return absl::InvalidArgumentError("data: given twice, must be given once");
      } else {
        reader_.Take(static_cast<int64_t>(field.value),
                     [this](PieceReader::Piece piece) { parsed_.data.push_back(piece); });
      }
    }
    return absl::OkStatus();
  }

  /// Copies a field with its tag.
  absl::Status CopyValue(const Field& field, std::string& text) {
    const size_t begin = text.size();
    AppendVarint(field.number << 3 | static_cast<uint32_t>(field.type), text);
    if (field.type == WireType::kVarint || field.type == WireType::kBytes) {
      AppendVarint(field.value, text);
    }
    copied_bytes_ += text.size() - begin;  // Unknown fields of two bytes take 16 bytes in Protobuf.
    return CopyBytes(field.type == WireType::kVarint ? 0 : field.value, text);
  }

  absl::Status CopyBytes(uint64_t size, std::string& text) {
    copied_bytes_ += size;
    if (copied_bytes_ > kSmallMessageBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat("PushWeightsRequest: ", copied_bytes_,
                                                     " bytes beside data, must be at most ",
                                                     kSmallMessageBytesMax));
    }
    const size_t begin = text.size();
    text.resize(begin + size);
    reader_.CopyTo(text.data() + begin, static_cast<int64_t>(size));
    return absl::OkStatus();
  }

  static void AppendVarint(uint64_t value, std::string& text) {
    for (; value > 0x7F; value >>= 7) text.push_back(static_cast<char>(value | 0x80));
    text.push_back(static_cast<char>(value));
  }

  PieceReader reader_;
  ParsedPush parsed_;
  bool has_data_ = false;
  uint64_t copied_bytes_ = 0;
};

}  // namespace

absl::StatusOr<ParsedPush> ParsePush(absl::Span<const absl::Span<const std::byte>> pieces) {
  return Parser(pieces).Parse();
}

}  // namespace logprobd
