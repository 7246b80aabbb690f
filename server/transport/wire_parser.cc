#include "server/transport/wire_parser.h"

#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "logprobd/v1/scoring.pb.h"
#include "server/base/text.h"
#include "server/transport/slice_parser.h"
#include "server/transport/wire_reader.h"

namespace logprobd {
namespace {

static_assert(std::endian::native == std::endian::little, "arrays are copied without conversion");

using Request = v1::ScoreRequest;

/// Field numbers are below this.
constexpr uint32_t kNumbersMax = 64;

struct Field {
  absl::string_view name;  ///< Empty for an unknown field.
  WireType type = WireType::kVarint;
};

WireType WireTypeOf(const google::protobuf::FieldDescriptor& field) {
  using Type = google::protobuf::FieldDescriptor::CppType;
  switch (field.cpp_type()) {
    case Type::CPPTYPE_STRING:
    case Type::CPPTYPE_MESSAGE:
      return WireType::kBytes;
    case Type::CPPTYPE_FLOAT:
      return WireType::kFixed32;
    case Type::CPPTYPE_DOUBLE:
      return WireType::kFixed64;
    default:
      return WireType::kVarint;  // the proto file has no fixed-size integers
  }
}

/// Returns the field of this number, or one without a name if it is not known.
Field FieldOf(uint32_t number) {
  static const auto fields = [] {
    std::array<Field, kNumbersMax> found;
    const google::protobuf::Descriptor& request = *Request::descriptor();
    for (int i = 0; i < request.field_count(); ++i) {
      const google::protobuf::FieldDescriptor& field = *request.field(i);
      found.at(static_cast<size_t>(field.number())) = {field.name(), WireTypeOf(field)};
    }
    return found;
  }();
  return number < kNumbersMax ? fields[number] : Field();
}

class Parser {
 public:
  Parser(absl::Span<const PieceReader::Piece> pieces, std::shared_ptr<void> owner)
      : reader_(pieces) {
    request_.hidden.owner = std::move(owner);
  }

  ParsedScoreRequest Parse() && {
    while (!reader_.AtEnd() && ReadField()) {
    }
    return {std::move(status_), std::move(request_)};
  }

 private:
  /// Keeps the first error.
  template <typename... Parts>
  void Fail(const Parts&... parts) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(parts...));
  }

  /// Records an error after which no further field can be found, and returns false.
  template <typename... Parts>
  bool Break(const Parts&... parts) {
    Fail("ScoreRequest: ", parts...);
    return false;
  }

  /// Reads a field. Returns false when parsing cannot continue.
  bool ReadField() {
    const int64_t begin = reader_.position();
    uint64_t tag = 0;
    if (!reader_.ReadVarint(kTagBytesMax, tag) || tag > std::numeric_limits<uint32_t>::max()) {
      return Break("no valid field tag at byte ", begin);
    }
    const auto number = static_cast<uint32_t>(tag >> 3);
    const auto type = static_cast<WireType>(tag & 7);
    if (number == 0) return Break("field number 0 at byte ", begin);
    const Field field = FieldOf(number);
    const bool is_known = !field.name.empty();
    const bool matches = is_known && field.type == type;
    if (is_known && !matches) {
      Fail(field.name, ": wire type ", tag & 7, ", must be ", static_cast<uint32_t>(field.type));
    }
    if (!ReadValue(number, type, field.name, matches)) return false;
    if (!is_known) {
      unknown_bytes_ += reader_.position() - begin;
      if (unknown_bytes_ > kUnknownBytesMax) {
        Fail("ScoreRequest: ", unknown_bytes_, " bytes of unknown fields, must be at most ",
             kUnknownBytesMax);
      }
    }
    return true;
  }

  bool ReadValue(uint32_t number, WireType type, absl::string_view name, bool matches) {
    const absl::string_view shown = name.empty() ? "an unknown field" : name;
    switch (type) {
      case WireType::kVarint: {
        uint64_t value = 0;
        if (!reader_.ReadVarint(kVarintBytesMax, value)) {
          return Break(shown, ": the number is truncated or has more than 64 bits");
        }
        if (matches) SetNumber(number, name, value);
        return true;
      }
      case WireType::kFixed32: {
        if (reader_.remaining() < 4) return Break(shown, ": truncated");
        uint32_t bits = 0;
        reader_.CopyTo(&bits, 4);
        if (matches) SetNumber(number, name, bits);
        return true;
      }
      case WireType::kFixed64:
        if (reader_.remaining() < 8) return Break(shown, ": truncated");
        reader_.Skip(8);
        return true;
      case WireType::kBytes: {
        uint64_t length = 0;
        if (!reader_.ReadVarint(kLengthBytesMax, length)) {
          return Break(shown, ": the length is truncated or too large");
        }
        if (length > static_cast<uint64_t>(reader_.remaining())) {
          return Break(shown, ": length ", length, ", but ", reader_.remaining(),
                       " bytes are left");
        }
        const auto bytes = static_cast<int64_t>(length);
        if (matches) {
          SetBytes(number, name, bytes);
        } else {
          reader_.Skip(bytes);
        }
        return true;
      }
      default:
        return Break(shown, ": wire type ", static_cast<uint32_t>(type),
                     ", groups are not supported");
    }
  }

  // clang-format off
  void SetNumber(uint32_t number, absl::string_view name, uint64_t value) {
    const auto set = [&](auto& member) { Set(name, value, member); };
    switch (number) {
      case Request::kOutputsFieldNumber: return set(request_.output_bits);
      case Request::kIgnoreIndexFieldNumber: {  // sint32: zigzag
        uint32_t coded = 0;
        Set(name, value, coded);
        request_.ignore_index = static_cast<int32_t>((coded >> 1) ^ (~(coded & 1) + 1));
        return;
      }
      // [generated: request_numbers]
      case Request::kWeightsVersionFieldNumber: return set(request_.weights_version);
      case Request::kDtypeFieldNumber: return set(request_.dtype_number);
      case Request::kRowsFieldNumber: return set(request_.rows);
      case Request::kHiddenSizeFieldNumber: return set(request_.hidden_size);
      case Request::kTemperatureFieldNumber: return set(request_.temperature);
      case Request::kEntropyTemperatureFieldNumber: return set(request_.entropy_temperature);
      case Request::kTopKFieldNumber: return set(request_.top_k);
      case Request::kPriorityFieldNumber: return set(request_.priority_number);
      case Request::kRejectNonfiniteFieldNumber: return set(request_.reject_nonfinite);
      case Request::kChunkIdFieldNumber: return set(request_.chunk_id);
      case Request::kTraceFieldNumber: return set(request_.trace);
      // [end]
      default: return;
    }
  }

  void SetBytes(uint32_t number, absl::string_view name, int64_t length) {
    switch (number) {
      case Request::kRequestIdFieldNumber:
        request_.request_id = TextOf(name, length, kRequestIdBytesMax);
        return;
      case Request::kHeadFieldNumber:
        request_.head = TextOf(name, length, kHeadNameBytesMax);
        return;
      case Request::kTraceparentFieldNumber:
        request_.trace_context = TraceContext::Parse(Utf8Of(name, length, kTraceparentBytesMax));
        return;
      default:
        break;
    }
    const uint64_t bit = uint64_t{1} << number;
    if ((payloads_seen_ & bit) != 0) {
      Fail(name, ": given twice, must be given once");
      reader_.Skip(length);
      return;
    }
    payloads_seen_ |= bit;
    const auto set = [&](auto& member) { SetArray(name, length, member); };
    switch (number) {
      // [generated: request_arrays]
      case Request::kTargetsFieldNumber: return set(request_.targets);
      case Request::kRowTemperaturesFieldNumber: return set(request_.row_temperatures);
      case Request::kCandidateIdsFieldNumber: return set(request_.candidate_ids);
      case Request::kCandidateOffsetsFieldNumber: return set(request_.candidate_offsets);
      case Request::kSegmentOffsetsFieldNumber: return set(request_.segment_offsets);
      // [end]
      default: return SetPayload(number, name, length);
    }
  }
  // clang-format on

  void Set(absl::string_view /*name*/, uint64_t value, uint64_t& member) { member = value; }

  void Set(absl::string_view /*name*/, uint64_t value, bool& member) { member = value != 0; }

  void Set(absl::string_view /*name*/, uint64_t bits, float& member) {
    member = std::bit_cast<float>(static_cast<uint32_t>(bits));
  }

  void Set(absl::string_view name, uint64_t value, uint32_t& member) {
    if (value > std::numeric_limits<uint32_t>::max()) {
      Fail(name, ": ", value, ", must be less than 2^32");
      return;
    }
    member = static_cast<uint32_t>(value);
  }

  /// Sets a count, which is a uint32 on the wire.
  void Set(absl::string_view name, uint64_t value, int64_t& member) {
    auto small = static_cast<uint32_t>(member);
    Set(name, value, small);
    member = small;
  }

  /// Sets an enum. Protobuf sign-extends negative values to 64 bits.
  void Set(absl::string_view name, uint64_t value, int32_t& member) {
    const auto number = static_cast<int64_t>(value);
    if (number != static_cast<int32_t>(number)) {
      Fail(name, ": ", number, ", must fit into 32 bits");
      return;
    }
    member = static_cast<int32_t>(number);
  }

  template <typename T>
  void Set(absl::string_view name, uint64_t value, std::optional<T>& member) {
    Set(name, value, member.emplace());
  }

  /// Reads one of the fields that hold or locate the rows. A request may have only one of them.
  void SetPayload(uint32_t number, absl::string_view name, int64_t length) {
    if (!payload_.empty()) {
      Fail(name, ": given together with ", payload_, ", must be the only payload");
    }
    payload_ = name;
    if (number == Request::kSharedMemoryFieldNumber) {
      request_.shared_memory = SliceOf(name, length, ParseSharedMemorySlice);
    } else if (number == Request::kCudaIpcFieldNumber) {
      request_.cuda_ipc = SliceOf(name, length, ParseCudaIpcSlice);
    } else {
      request_.hidden.bytes = length;
      reader_.Take(length,
                   [this](PieceReader::Piece piece) { request_.hidden.pieces.push_back(piece); });
    }
  }

  template <typename Slice>
  std::optional<Slice> SliceOf(absl::string_view name, int64_t length,
                               absl::StatusOr<Slice> (*parse)(absl::Span<const std::byte>)) {
    if (length > kSliceBytesMax) {
      Fail(name, ": ", length, " bytes, must be at most ", kSliceBytesMax);
      reader_.Skip(length);
      return std::nullopt;
    }
    std::array<std::byte, kSliceBytesMax> bytes = {};
    reader_.CopyTo(bytes.data(), length);
    absl::StatusOr<Slice> slice =
        parse(absl::MakeConstSpan(bytes).first(static_cast<size_t>(length)));
    if (!slice.ok()) {
      Fail(slice.status().message());
      return std::nullopt;
    }
    return *std::move(slice);
  }

  template <typename T>
  void SetArray(absl::string_view name, int64_t length, std::vector<T>& values) {
    static_assert(sizeof(T) == 4);
    if (length % 4 != 0) {
      Fail(name, ": ", length, " bytes, must be a multiple of 4");
      reader_.Skip(length);
      return;
    }
    values.resize(static_cast<size_t>(length) / 4);
    reader_.CopyTo(values.data(), length);
  }

  /// Reads a string. Returns an empty string when the text breaks a rule, so that only checked text
  /// is echoed and logged.
  std::string TextOf(absl::string_view name, int64_t length, int64_t bytes_max) {
    std::string text = Utf8Of(name, length, bytes_max);
    if (HasControlCharacters(text)) {
      Fail(name, ": holds control characters, must hold none");
      return {};
    }
    return text;
  }

  /// Reads a string that may hold any characters.
  std::string Utf8Of(absl::string_view name, int64_t length, int64_t bytes_max) {
    if (length > bytes_max) {
      Fail(name, ": ", length, " bytes, must be at most ", bytes_max);
      reader_.Skip(length);
      return {};
    }
    std::string text(static_cast<size_t>(length), '\0');
    reader_.CopyTo(text.data(), length);
    if (!IsUtf8(text)) {
      Fail(name, ": not valid UTF-8");
      return {};
    }
    return text;
  }

  PieceReader reader_;
  absl::Status status_;
  ScoreRequest request_;
  uint64_t payloads_seen_ = 0;  ///< Bit n is set when field n was seen.
  absl::string_view payload_;   ///< Name of the field that holds or locates the rows.
  int64_t unknown_bytes_ = 0;
};

}  // namespace

ParsedScoreRequest ParseScoreRequest(absl::Span<const absl::Span<const std::byte>> pieces,
                                     std::shared_ptr<void> owner) {
  return Parser(pieces, std::move(owner)).Parse();
}

}  // namespace logprobd
