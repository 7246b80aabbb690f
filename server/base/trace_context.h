#pragma once

#include <array>
#include <cstddef>

#include "absl/strings/string_view.h"

namespace logprobd {

/// The place of a request in a caller's distributed trace: the W3C `traceparent`
/// (https://www.w3.org/TR/trace-context/), which names the trace and the caller's span in it.
class TraceContext {
 public:
  /// Size of a traceparent of version 00, and of the part of later versions that is known.
  static constexpr size_t kTextBytes = 55;

  /// Belongs to no trace.
  TraceContext() = default;

  /// Parses a traceparent: lower-case hexadecimal "version-trace id-span id-flags" of 2, 32, 16 and
  /// 2 digits. Version 00 must end there; of later versions, what follows after another '-' is
  /// ignored. Returns an empty context for other text, for version ff and for ids of zeros, since
  /// the specification says to ignore a traceparent that is not valid.
  static TraceContext Parse(absl::string_view traceparent);

  bool empty() const { return text_[0] == '\0'; }
  /// Returns the traceparent up to its flags, or "" if the context is empty.
  absl::string_view traceparent() const;
  /// Returns the trace id, 32 digits, or "" if the context is empty.
  absl::string_view trace_id() const;

 private:
  std::array<char, kTextBytes> text_ = {};  // An array, so that copies allocate no memory.
};

}  // namespace logprobd
