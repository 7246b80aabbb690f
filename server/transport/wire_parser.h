#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/base/score_request.h"

namespace logprobd {

/// The result of parsing a message. On an error `request` holds the fields that were parsed. If the
/// framing is intact, parsing continues after the first error, so that the response can carry
/// request_id and chunk_id.
struct ParsedScoreRequest {
  absl::Status status;  ///< OK, or INVALID_ARGUMENT that names the field.
  ScoreRequest request;
};

/// Maximum number of bytes of unknown fields. Servers accept the fields of newer clients, but no
/// large payloads in them.
inline constexpr int64_t kUnknownBytesMax = 64 << 10;
/// Maximum sizes of a request_id and of a head's name in bytes.
inline constexpr int64_t kRequestIdBytesMax = 128;
inline constexpr int64_t kHeadNameBytesMax = 256;
/// Maximum size of the field traceparent in bytes; versions of the specification may extend it.
inline constexpr int64_t kTraceparentBytesMax = 256;

/// Parses a serialised proto ScoreRequest that arrived in `pieces`, which may be cut anywhere.
///
/// `hidden` is not copied: request.hidden points into the pieces and shares `owner`. Protobuf reads
/// every accepted message in the same way. In addition to what Protobuf refuses, the parser
/// refuses: payload fields given twice or together, a known field with another wire type, groups,
/// numbers outside the range of their type, arrays whose size is no multiple of 4 bytes, more than
/// kUnknownBytesMax of unknown fields, strings that are too long or hold control characters, and
/// what slice_parser.h lists. A traceparent that is not valid counts as absent. Thread-safe.
ParsedScoreRequest ParseScoreRequest(absl::Span<const absl::Span<const std::byte>> pieces,
                                     std::shared_ptr<void> owner);

}  // namespace logprobd
