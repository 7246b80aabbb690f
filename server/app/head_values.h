#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/app/server_options.h"

namespace logprobd {

/// A part of a flag's text: for one head, or for all where `head` is empty.
struct HeadText {
  std::string head;
  std::string text;
};

/// Takes "policy=2,reference=4" apart. A value of one head is NAME=VALUE, where NAME is not empty
/// and has no slash, comma or "=": so a path with "=" in it is written with a slash before that, as
/// in "./a=b". The next one begins at a comma that NAME= follows. What does not begin with NAME= is
/// a value for all heads, up to the first such comma; of --model it is one path, whatever follows.
/// Flags that are not of heads stay as they are.
std::vector<HeadText> SplitByHead(const Flag& flag, absl::string_view text);

/// Sets a flag from all that one source says of it, in place of what it was. INVALID_ARGUMENT says
/// what is wrong after the name of the source, as in `is "x" for head "a": it must be ...`.
absl::Status SetFlagFromSource(const Flag& flag, absl::Span<const std::string> texts,
                               ServerOptions& options);

/// The settings of each head in the order of --model, as a server of that head alone would have
/// them: `model` and `head_name` are its own, so is every value of a flag of heads, and
/// `queue_bytes` is its part. Those of a server with one head are `options`.
std::vector<ServerOptions> HeadOptions(const ServerOptions& options);

/// What is wrong with the heads' names and with values for heads, before CheckServerOptions looks
/// at the settings of each. INVALID_ARGUMENT names flag and head.
absl::Status CheckHeads(const ServerOptions& options);

}  // namespace logprobd
