#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd::testing {

/// A copy of some bytes in pieces, cut as `seed` decides, each at an address of its own.
class CutBytes {
 public:
  CutBytes(absl::string_view bytes, uint32_t seed);

  /// `seed` 0 leaves the bytes in one piece, 1 cuts after each byte.
  absl::Span<const absl::Span<const std::byte>> pieces() const { return pieces_; }

 private:
  std::vector<std::vector<std::byte>> storage_;
  std::vector<absl::Span<const std::byte>> pieces_;
};

/// Parses `bytes` with ParseScoreRequest and with Protobuf. What must hold: both read the same,
/// or ours refuses, and if Protobuf accepts then for one of the reasons that wire_parser.h states.
/// Returns what does not hold.
std::optional<std::string> WireParserDifference(absl::string_view bytes, uint32_t seed);

}  // namespace logprobd::testing
