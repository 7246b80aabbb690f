#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/types/span.h"

namespace logprobd {

/// Encoding of a Protobuf field.
enum class WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kGroupBegin = 3,
  kGroupEnd = 4,
  kFixed32 = 5
};

// Maximum sizes of encodings that Protobuf accepts, in bytes.
inline constexpr int kTagBytesMax = 5;
inline constexpr int kLengthBytesMax = 5;
inline constexpr int kVarintBytesMax = 10;

/// Reads bytes and varints from a message in pieces, which may be cut anywhere.
class PieceReader {
 public:
  using Piece = absl::Span<const std::byte>;

  explicit PieceReader(absl::Span<const Piece> pieces) : pieces_(pieces) {
    for (const Piece piece : pieces) remaining_ += static_cast<int64_t>(piece.size());
    total_ = remaining_;
  }

  bool AtEnd() const { return remaining_ == 0; }
  int64_t remaining() const { return remaining_; }
  int64_t position() const { return total_ - remaining_; }

  /// Calls use(piece) for each piece of the next `length` bytes. `length` must be <= remaining().
  template <typename Use>
  void Take(int64_t length, Use use) {
    remaining_ -= length;
    while (length > 0) {
      const Piece piece = pieces_[index_].subspan(offset_);
      const size_t size = std::min(piece.size(), static_cast<size_t>(length));
      if (size > 0) use(piece.first(size));
      length -= static_cast<int64_t>(size);
      offset_ += size;
      if (offset_ == pieces_[index_].size()) {
        ++index_;
        offset_ = 0;
      }
    }
  }

  void Skip(int64_t length) {
    Take(length, [](Piece) {});
  }

  void CopyTo(void* destination, int64_t length) {
    auto* out = static_cast<std::byte*>(destination);
    Take(length, [&out](Piece piece) {
      std::memcpy(out, piece.data(), piece.size());
      out += piece.size();
    });
  }

  /// Reads a varint of at most `bytes_max` bytes and 64 bits. Returns false if it is truncated or
  /// exceeds a limit.
  bool ReadVarint(int bytes_max, uint64_t& value) {
    value = 0;
    for (int i = 0; i < bytes_max && remaining_ > 0; ++i) {
      uint8_t byte = 0;
      CopyTo(&byte, 1);
      if (i == 9 && byte > 1) return false;
      value |= static_cast<uint64_t>(byte & 0x7F) << (7 * i);
      if ((byte & 0x80) == 0) return true;
    }
    return false;
  }

 private:
  absl::Span<const Piece> pieces_;
  size_t index_ = 0;   ///< Index of the piece with the next byte.
  size_t offset_ = 0;  ///< Offset of the next byte in that piece.
  int64_t total_ = 0;
  int64_t remaining_ = 0;
};

}  // namespace logprobd
