#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/base/score_request.h"

namespace logprobd {

/// What became of a message. On an error `request` holds what was understood: as long as the
/// framing is whole, parsing goes on after the first error, so that an answer can carry request_id
/// and chunk_id.
struct ParsedScoreRequest {
  absl::Status status;  ///< INVALID_ARGUMENT naming the field.
  ScoreRequest request;
};

/// Most bytes of fields that this version does not know; older servers can still read newer
/// clients, but nobody ships payloads to be skipped.
inline constexpr int64_t kUnknownBytesMax = 64 << 10;
inline constexpr int64_t kRequestIdBytesMax = 128;
inline constexpr int64_t kHeadNameBytesMax = 256;

/// Reads a serialised proto ScoreRequest that arrived in `pieces`, cut anywhere.
///
/// `hidden` is not copied: request.hidden points into the pieces and shares `owner`. Whatever this
/// accepts, Protobuf reads the same. It is stricter, always with INVALID_ARGUMENT, about: payload
/// fields given twice or beside each other, a known field with another wire type, groups, numbers
/// beyond their type, arrays that are no multiple of 4 bytes, more than kUnknownBytesMax of unknown
/// fields, control characters in strings, and their length; slices as slice_parser.h says.
/// Thread-safe.
ParsedScoreRequest ParseScoreRequest(absl::Span<const absl::Span<const std::byte>> pieces,
                                     std::shared_ptr<void> owner);

}  // namespace logprobd
