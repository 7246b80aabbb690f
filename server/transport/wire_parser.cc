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
#include "server/base/text.h"
#include "server/transport/slice_parser.h"
#include "server/transport/wire_reader.h"

namespace logprobd {
namespace {

static_assert(std::endian::native == std::endian::little, "arrays are copied without conversion");

/// Field numbers of proto ScoreRequest.
enum FieldNumber : uint32_t {
  kRequestId = 1,
  kHead = 2,
  kWeightsVersion = 3,
  kDtype = 4,
  kRows = 5,
  kHiddenSize = 6,
  kTargets = 7,
  kTemperature = 8,
  kRowTemperatures = 9,
  kEntropyTemperature = 10,
  kIgnoreIndex = 11,
  kOutputs = 12,
  kTopK = 13,
  kCandidateIds = 14,
  kCandidateOffsets = 15,
  kSegmentOffsets = 16,
  kPriority = 17,
  kRejectNonfinite = 18,
  kChunkId = 19,
  kTraceparent = 20,
  kTrace = 21,
  kHidden = 32,
  kSharedMemory = 33,
  kCudaIpc = 34,
};

struct Field {
  absl::string_view name;  ///< Empty for an unknown field.
  WireType type = WireType::kVarint;
};

Field FieldOf(uint32_t number) {
  switch (number) {
    case kRequestId:
      return {"request_id", WireType::kBytes};
    case kHead:
      return {"head", WireType::kBytes};
    case kWeightsVersion:
      return {"weights_version", WireType::kVarint};
    case kDtype:
      return {"dtype", WireType::kVarint};
    case kRows:
      return {"rows", WireType::kVarint};
    case kHiddenSize:
      return {"hidden_size", WireType::kVarint};
    case kTargets:
      return {"targets", WireType::kBytes};
    case kTemperature:
      return {"temperature", WireType::kFixed32};
    case kRowTemperatures:
      return {"row_temperatures", WireType::kBytes};
    case kEntropyTemperature:
      return {"entropy_temperature", WireType::kFixed32};
    case kIgnoreIndex:
      return {"ignore_index", WireType::kVarint};
    case kOutputs:
      return {"outputs", WireType::kVarint};
    case kTopK:
      return {"top_k", WireType::kVarint};
    case kCandidateIds:
      return {"candidate_ids", WireType::kBytes};
    case kCandidateOffsets:
      return {"candidate_offsets", WireType::kBytes};
    case kSegmentOffsets:
      return {"segment_offsets", WireType::kBytes};
    case kPriority:
      return {"priority", WireType::kVarint};
    case kRejectNonfinite:
      return {"reject_nonfinite", WireType::kVarint};
    case kChunkId:
      return {"chunk_id", WireType::kVarint};
    case kTraceparent:
      return {"traceparent", WireType::kBytes};
    case kTrace:
      return {"trace", WireType::kVarint};
    case kHidden:
      return {"hidden", WireType::kBytes};
    case kSharedMemory:
      return {"shared_memory", WireType::kBytes};
    case kCudaIpc:
      return {"cuda_ipc", WireType::kBytes};
    default:
      return {};
  }
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
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(absl::StrCat(parts...));
    }
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
    if (number == 0) {
      return Break("field number 0 at byte ", begin);
    }
    const Field field = FieldOf(number);
    const bool is_known = !field.name.empty();
    const bool matches = is_known && field.type == type;
    if (is_known && !matches) {
      Fail(field.name, ": wire type ", tag & 7, ", must be ", static_cast<uint32_t>(field.type));
    }
    if (!ReadValue(number, type, field.name, matches)) {
      return false;
    }
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
        if (matches) {
          SetNumber(number, name, value);
        }
        return true;
      }
      case WireType::kFixed32: {
        if (reader_.remaining() < 4) {
          return Break(shown, ": truncated");
        }
        float value = 0;
        reader_.CopyTo(&value, 4);
        if (matches) {
          (number == kTemperature ? request_.temperature : request_.entropy_temperature) = value;
        }
        return true;
      }
      case WireType::kFixed64:
        if (reader_.remaining() < 8) {
          return Break(shown, ": truncated");
        }
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

  void SetNumber(uint32_t number, absl::string_view name, uint64_t value) {
    switch (number) {
      case kWeightsVersion:
        request_.weights_version = value;
        return;
      case kChunkId:
        request_.chunk_id = value;
        return;
      case kRejectNonfinite:
        request_.reject_nonfinite = value != 0;
        return;
      case kTrace:
        request_.trace = value != 0;
        return;
      case kDtype:
        request_.dtype_number = EnumOf(name, value);
        return;
      case kPriority:
        request_.priority_number = EnumOf(name, value);
        return;
      default:
        break;
    }
    if (value > std::numeric_limits<uint32_t>::max()) {
      Fail(name, ": ", value, ", must be less than 2^32");
      return;
    }
    const auto small = static_cast<uint32_t>(value);
    switch (number) {
      case kRows:
        request_.rows = small;
        return;
      case kHiddenSize:
        request_.hidden_size = small;
        return;
      case kOutputs:
        request_.output_bits = small;
        return;
      case kTopK:
        request_.top_k = small;
        return;
      case kIgnoreIndex:  // sint32: zigzag
        request_.ignore_index = static_cast<int32_t>((small >> 1) ^ (~(small & 1) + 1));
        return;
      default:
        return;
    }
  }

  /// Converts an enum value. Protobuf sign-extends negative ones to 64 bits.
  int32_t EnumOf(absl::string_view name, uint64_t value) {
    const auto number = static_cast<int64_t>(value);
    if (number != static_cast<int32_t>(number)) {
      Fail(name, ": ", number, ", must fit into 32 bits");
      return 0;
    }
    return static_cast<int32_t>(number);
  }

  void SetBytes(uint32_t number, absl::string_view name, int64_t length) {
    switch (number) {
      case kRequestId:
        request_.request_id = TextOf(name, length, kRequestIdBytesMax);
        return;
      case kHead:
        request_.head = TextOf(name, length, kHeadNameBytesMax);
        return;
      case kTraceparent:
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
    switch (number) {
      case kTargets:
        return SetArray(name, length, request_.targets);
      case kRowTemperatures:
        return SetArray(name, length, request_.row_temperatures);
      case kCandidateIds:
        return SetArray(name, length, request_.candidate_ids);
      case kCandidateOffsets:
        return SetArray(name, length, request_.candidate_offsets);
      case kSegmentOffsets:
        return SetArray(name, length, request_.segment_offsets);
      default:
        return SetPayload(number, name, length);
    }
  }

  /// Reads one of the fields that hold or locate the rows. A request may have only one of them.
  void SetPayload(uint32_t number, absl::string_view name, int64_t length) {
    if (!payload_.empty()) {
      Fail(name, ": given together with ", payload_, ", must be the only payload");
    }
    payload_ = name;
    if (number == kSharedMemory) {
      request_.shared_memory = SliceOf(name, length, ParseSharedMemorySlice);
    } else if (number == kCudaIpc) {
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
  uint64_t payloads_seen_ = 0;  ///< Bit n is set when field n was seen; numbers are below 64.
  absl::string_view payload_;   ///< Name of the field that holds or locates the rows.
  int64_t unknown_bytes_ = 0;
};

}  // namespace

ParsedScoreRequest ParseScoreRequest(absl::Span<const absl::Span<const std::byte>> pieces,
                                     std::shared_ptr<void> owner) {
  return Parser(pieces, std::move(owner)).Parse();
}

}  // namespace logprobd
