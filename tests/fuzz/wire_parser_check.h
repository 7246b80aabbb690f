#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd::testing {

/// A copy of some bytes in separately allocated pieces.
class CutBytes {
 public:
  /// `seed` determines where the bytes are split: 0 gives one piece, and 1 gives pieces of one
  /// byte.
  CutBytes(absl::string_view bytes, uint32_t seed);

  absl::Span<const absl::Span<const std::byte>> pieces() const { return pieces_; }

 private:
  std::vector<std::vector<std::byte>> storage_;
  std::vector<absl::Span<const std::byte>> pieces_;
};

/// Parses `bytes` with ParseScoreRequest and with Protobuf. Both must read the same values, or
/// ParseScoreRequest must refuse the message. If Protobuf accepts the message, the reason for the
/// refusal must be one that wire_parser.h lists. Returns a description of the first violation, or
/// nullopt if there is none.
std::optional<std::string> WireParserDifference(absl::string_view bytes, uint32_t seed);

}  // namespace logprobd::testing
