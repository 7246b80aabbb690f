#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace logprobd::testing {

/// Parses `bytes`, cut by `seed` as CutBytes does, with ParsePush and with Protobuf. Both must read
/// the same message, or ParsePush must refuse it. If Protobuf accepts it, the reason for the
/// refusal must be one that push_parser.h lists. Returns a description of the first violation, or
/// nullopt if there is none.
std::optional<std::string> PushParserDifference(absl::string_view bytes, uint32_t seed);

}  // namespace logprobd::testing
