#include "server/transport/slice_parser.h"

#include <algorithm>
#include <limits>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/transport/wire_reader.h"

namespace logprobd {
namespace {

/// A field of a slice message and the destination of its value: bytes of a fixed size, or a number.
struct SliceField {
  uint32_t number;
  absl::string_view name;
  std::variant<absl::Span<uint8_t>, int64_t*> value;
  bool is_seen = false;
};

class SliceReader {
 public:
  SliceReader(absl::string_view name, absl::Span<const std::byte> bytes,
              absl::Span<SliceField> fields)
      : name_(name), piece_(bytes), reader_(absl::MakeConstSpan(&piece_, 1)), fields_(fields) {}

  /// Reads all fields. Every field of fixed size must be present.
  absl::Status Read() {
    while (!reader_.AtEnd()) {
      LOGPROBD_RETURN_IF_ERROR(ReadField());
    }
    for (const SliceField& field : fields_) {
      const auto* fixed = std::get_if<absl::Span<uint8_t>>(&field.value);
      if (fixed != nullptr && !field.is_seen) {
        return Error(field.name, "0 bytes, must be exactly ", fixed->size());
      }
    }
    return absl::OkStatus();
  }

 private:
  template <typename... Parts>
  absl::Status Error(absl::string_view field, const Parts&... parts) const {
    return absl::InvalidArgumentError(
        absl::StrCat(name_, field.empty() ? "" : ".", field, ": ", parts...));
  }

  absl::Status ReadField() {
    uint64_t tag = 0;
    if (!reader_.ReadVarint(kTagBytesMax, tag) || tag > std::numeric_limits<uint32_t>::max() ||
        tag >> 3 == 0) {
      return Error("", "no valid field tag at byte ", reader_.position());
    }
    const auto type = static_cast<WireType>(tag & 7);
    auto* const field =
        std::find_if(fields_.begin(), fields_.end(),
                     [tag](const SliceField& known) { return known.number == tag >> 3; });
    if (field == fields_.end()) return SkipUnknown(type);
    if (field->is_seen) return Error(field->name, "given twice, must be given once");
    field->is_seen = true;
    const auto expected =
        std::holds_alternative<int64_t*>(field->value) ? WireType::kVarint : WireType::kBytes;
    if (type != expected) {
      return Error(field->name, "wire type ", tag & 7, ", must be ",
                   static_cast<uint32_t>(expected));
    }
    return expected == WireType::kVarint ? ReadNumber(*field) : ReadFixed(*field);
  }

  absl::Status ReadNumber(const SliceField& field) {
    uint64_t value = 0;
    if (!reader_.ReadVarint(kVarintBytesMax, value)) {
      return Error(field.name, "the number is truncated or has more than 64 bits");
    }
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Error(field.name, value, ", must be less than 2^63");
    }
    *std::get<int64_t*>(field.value) = static_cast<int64_t>(value);
    return absl::OkStatus();
  }

  absl::Status ReadFixed(const SliceField& field) {
    const absl::Span<uint8_t> out = std::get<absl::Span<uint8_t>>(field.value);
    uint64_t length = 0;
    LOGPROBD_RETURN_IF_ERROR(ReadLength(field.name, length));
    if (length != out.size()) {
      return Error(field.name, length, " bytes, must be exactly ", out.size());
    }
    reader_.CopyTo(out.data(), static_cast<int64_t>(length));
    return absl::OkStatus();
  }

  absl::Status ReadLength(absl::string_view field, uint64_t& length) {
    if (!reader_.ReadVarint(kLengthBytesMax, length) ||
        length > static_cast<uint64_t>(reader_.remaining())) {
      return Error(field, "the length is truncated or too large");
    }
    return absl::OkStatus();
  }

  absl::Status SkipUnknown(WireType type) {
    uint64_t number = 0;
    switch (type) {
      case WireType::kVarint:
        return reader_.ReadVarint(kVarintBytesMax, number)
                   ? absl::OkStatus()
                   : Error("", "the number is truncated or has more than 64 bits");
      case WireType::kBytes:
        LOGPROBD_RETURN_IF_ERROR(ReadLength("", number));
        reader_.Skip(static_cast<int64_t>(number));
        return absl::OkStatus();
      case WireType::kFixed32:
      case WireType::kFixed64: {
        const int64_t size = type == WireType::kFixed32 ? 4 : 8;
        if (reader_.remaining() < size) return Error("", "an unknown field is truncated");
        reader_.Skip(size);
        return absl::OkStatus();
      }
      default:
        return Error("", "wire type ", static_cast<uint32_t>(type), ", groups are not supported");
    }
  }

  const absl::string_view name_;
  const PieceReader::Piece piece_;
  PieceReader reader_;
  const absl::Span<SliceField> fields_;
};

absl::Status CheckRange(absl::string_view name, int64_t offset, int64_t bytes, int64_t alignment) {
  if (offset % alignment != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ".offset: ", offset, ", must be a multiple of ", alignment));
  }
  if (bytes > std::numeric_limits<int64_t>::max() - offset) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ".bytes: ", bytes, " from offset ", offset, ", must end before 2^63"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SharedMemorySlice> ParseSharedMemorySlice(absl::Span<const std::byte> bytes) {
  SharedMemorySlice slice;
  SliceField fields[] = {{1, "region", absl::MakeSpan(slice.region)},
                         {2, "offset", &slice.offset},
                         {3, "bytes", &slice.bytes}};
  LOGPROBD_RETURN_IF_ERROR(SliceReader("shared_memory", bytes, absl::MakeSpan(fields)).Read());
  LOGPROBD_RETURN_IF_ERROR(
      CheckRange("shared_memory", slice.offset, slice.bytes, kSharedMemoryAlignment));
  return slice;
}

absl::StatusOr<CudaIpcSlice> ParseCudaIpcSlice(absl::Span<const std::byte> bytes) {
  CudaIpcSlice slice;
  DeviceSlice& memory = slice.memory;
  SliceField fields[] = {{1, "lease", absl::MakeSpan(slice.lease)},
                         {2, "device_uuid", absl::MakeSpan(memory.device_uuid)},
                         {3, "handle", absl::MakeSpan(memory.handle)},
                         {4, "offset", &memory.offset},
                         {5, "bytes", &memory.bytes}};
  LOGPROBD_RETURN_IF_ERROR(SliceReader("cuda_ipc", bytes, absl::MakeSpan(fields)).Read());
  LOGPROBD_RETURN_IF_ERROR(CheckRange("cuda_ipc", memory.offset, memory.bytes, kCudaIpcAlignment));
  return slice;
}

}  // namespace logprobd
