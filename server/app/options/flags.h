#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/app/options/server_options.h"

namespace logprobd {

/// One setting: a row of the table from which the command line, the environment, the configuration
/// file, --help and --print-config are made.
struct Flag {
  enum class Kind {
    kText,
    kSwitch,   ///< true or false; the flag without a value on the command line means true.
    kInteger,  ///< A whole number from `min` to `max`.
    kCount,    ///< Like kInteger, or "auto", which is stored as 0.
    kBytes,    ///< Like kInteger, also written as 64KiB, 64MiB or 2GiB.
    kNumber,   ///< A real number from `min` to `max`.
    kChoice,   ///< One of `choices`.
    kAddress,  ///< Text; "none" is stored as the empty string.
    kGpus,     ///< Distinct numbers from `min` to `max`, comma-separated; "auto" is an empty list.
  };

  /// A text that a choice accepts, and the value of the member's type for which it stands.
  struct Choice {
    absl::string_view text;
    std::variant<Device, GpuKernel, Exchange, LogLevel, LogFormat> value;
  };

  absl::string_view name;  ///< Name with dashes; file and environment also accept underscores.
  absl::string_view group;
  Kind kind = Kind::kText;
  std::variant<std::string ServerOptions::*, bool ServerOptions::*, int64_t ServerOptions::*,
               double ServerOptions::*, std::vector<int32_t> ServerOptions::*,
               Device ServerOptions::*, GpuKernel ServerOptions::*, Exchange ServerOptions::*,
               LogLevel ServerOptions::*, LogFormat ServerOptions::*>
      member;
  absl::string_view placeholder;  ///< Unit or kind of the value, as --help shows it.
  absl::string_view help;         ///< Sentences without range and default, which --help adds.
  double min = 0;
  double max = 0;
  std::vector<Choice> choices = {};
  /// True if only the command line can set the flag, because it requests an action of one start.
  bool command_line_only = false;
  /// True if the flag also accepts NAME=VALUE for the head of that name, and can be repeated.
  bool is_of_head = false;
  /// True if SIGHUP applies a new value; otherwise a new value needs a restart.
  bool is_reloadable = false;
};

/// Returns all flags, group by group, in the order of --help.
absl::Span<const Flag> Flags();

/// Returns the flag of that name, which may be written with dashes or underscores. Returns null if
/// there is none.
const Flag* FindFlag(absl::string_view name);

/// Returns the name of the flag with the smallest edit distance to `name`, for error messages. The
/// result is never empty.
std::string NearestFlag(absl::string_view name);

/// Sets the flag for all heads from `text`. Returns INVALID_ARGUMENT if the text is not valid. The
/// message says what the value must be, but does not name the flag.
absl::Status SetFlag(const Flag& flag, absl::string_view text, ServerOptions& options);

/// A part of a flag's text: the value for one head, or for all heads if `head` is empty.
struct HeadText {
  std::string head;
  std::string text;
};

/// Splits a text such as "policy=2,reference=4". The value of one head is NAME=VALUE, where NAME is
/// not empty and contains no slash, comma or "=". A path that contains "=" is therefore written
/// with a slash before it, as in "./a=b". The next value begins at a comma that is followed by
/// NAME=. If the text does not begin with NAME=, the part before the first such comma is a value
/// for all heads; for --model the whole text is one path. The text of a flag that cannot be set for
/// one head is not split.
std::vector<HeadText> SplitByHead(const Flag& flag, absl::string_view text);

/// Sets a flag from all texts of one source and replaces its earlier value, including the values of
/// single heads. If the function returns INVALID_ARGUMENT, the message continues a sentence that
/// begins with the name of the source, as in `is "x" for head "a": it must be ...`.
absl::Status SetFlagFromSource(const Flag& flag, absl::Span<const std::string> texts,
                               ServerOptions& options);

/// Returns the texts that a choice accepts, as in "auto, cpu, cuda".
std::string ChoicesText(const Flag& flag);

/// Returns the text of the value that a choice has in `options`.
absl::string_view ChoiceText(const Flag& flag, const ServerOptions& options);

/// Returns the shortest text that is parsed as `value`.
std::string NumberText(double value);

/// Returns bytes in the largest unit that divides them, for example 67108864 as "64MiB".
std::string BytesText(int64_t bytes);

/// Returns the flag's value as TOML: quoted text, true or false, a number, or "64MiB". Returns an
/// array of such values if heads have values of their own.
std::string FlagValueAsToml(const Flag& flag, const ServerOptions& options);

}  // namespace logprobd
