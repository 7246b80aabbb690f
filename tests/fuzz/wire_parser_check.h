#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd::testing {

/// A copy of some bytes in separately allocated pieces. `seed` decides where the bytes are cut.
class CutBytes {
 public:
  CutBytes(absl::string_view bytes, uint32_t seed);

  /// `seed` 0 gives one piece, and 1 gives pieces of one byte.
  absl::Span<const absl::Span<const std::byte>> pieces() const { return pieces_; }

 private:
  std::vector<std::vector<std::byte>> storage_;
  std::vector<absl::Span<const std::byte>> pieces_;
};

/// Parses `bytes` with ParseScoreRequest and with Protobuf. Both must read the same, or
/// ParseScoreRequest must refuse the message; if Protobuf accepts it, the refusal must have a
/// reason that wire_parser.h lists. Returns a description of what differs, or an empty string.
std::optional<std::string> WireParserDifference(absl::string_view bytes, uint32_t seed);

}  // namespace logprobd::testing
