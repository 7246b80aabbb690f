#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace logprobd {

/// Length of the well-formed UTF-8 sequence at the start of `text`, or 0 where there is none: no
/// surrogates, no overlong forms, nothing above U+10FFFF.
size_t Utf8SequenceLength(absl::string_view text);

/// Whether all of `text` is well-formed UTF-8.
bool IsUtf8(absl::string_view text);

/// The longest prefix of at most `bytes_max` bytes that cuts no sequence of well-formed `text`.
absl::string_view CutUtf8(absl::string_view text, size_t bytes_max);

/// `text` with '?' for each byte that is not part of a well-formed sequence.
std::string ToUtf8(absl::string_view text);

/// Whether well-formed `text` holds C0 or C1 control characters or DEL: they could forge log lines
/// and drive terminals.
bool HasControlCharacters(absl::string_view text);

/// "296.8 MiB"; below 10 KiB in bytes.
std::string HumanBytes(int64_t bytes);

}  // namespace logprobd
