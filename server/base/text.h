#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace logprobd {

/// Returns the length of the well-formed UTF-8 sequence at the start of `text`, or 0 if there is
/// none. Surrogates, overlong forms and values above U+10FFFF are not well-formed.
size_t Utf8SequenceLength(absl::string_view text);

/// Returns whether all of `text` is well-formed UTF-8.
bool IsUtf8(absl::string_view text);

/// Returns the longest prefix of well-formed `text` that has at most `bytes_max` bytes and does not
/// end inside a sequence.
absl::string_view CutUtf8(absl::string_view text, size_t bytes_max);

/// Returns `text` with '?' in place of each byte that is not part of a well-formed sequence.
std::string ToUtf8(absl::string_view text);

/// Returns whether well-formed `text` contains C0 or C1 control characters or DEL, which could
/// forge log lines or control a terminal.
bool HasControlCharacters(absl::string_view text);

/// Returns a size in readable form, such as "296.8 MiB". Sizes below 10 KiB are in bytes.
std::string HumanBytes(int64_t bytes);

}  // namespace logprobd
