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

/// Returns whether the character of `sequence`, which is well-formed, could end a line in some
/// reader or change what a terminal or a page shows of the text around it: the C0 and C1 control
/// characters, DEL, the line and paragraph separators (U+2028, U+2029), and the characters that set
/// the direction of text.
bool IsUnsafeToShow(absl::string_view sequence);

/// Returns `text`, whatever it is, as well-formed UTF-8 that every reader takes for one line:
/// writes the characters of IsUnsafeToShow as `\uXXXX`, bytes outside of well-formed sequences as
/// `\ufffd` and those of `also_escaped`, which must be ASCII, with a backslash before them. A
/// result of more than `bytes_max` bytes is cut, and the size of `text` stands behind it.
std::string OneLine(absl::string_view text, size_t bytes_max,
                    absl::string_view also_escaped = absl::string_view());

/// Returns a size in readable form, such as "296.8 MiB". Sizes below 10 KiB are in bytes.
std::string HumanBytes(int64_t bytes);

}  // namespace logprobd
