#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "logprobd/v1/weights.pb.h"

namespace logprobd {

/// A message of Weights.Push.
struct ParsedPush {
  v1::PushWeightsRequest message;                 ///< Without the bytes of PushedRows::data.
  std::vector<absl::Span<const std::byte>> data;  ///< Those bytes, where they were received.
};

/// Parses a message without copying `data`, whose copies would not count against gRPC's memory
/// quota. Returns INVALID_ARGUMENT for all that Protobuf refuses, and in addition for a field of
/// PushWeightsRequest or `data` that is given twice, a group, a number of more than 64 bits, and
/// other fields of more than 64 KiB together.
absl::StatusOr<ParsedPush> ParsePush(absl::Span<const absl::Span<const std::byte>> pieces);

}  // namespace logprobd
