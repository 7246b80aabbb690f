#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd {

/// What a flag says for one head alone, as in `--shards policy=2`.
struct HeadValue {
  absl::string_view flag;  ///< Its name, as in the table.
  std::string head;
  std::string text;  ///< As written; it has been checked.
};

/// Everything that can be set on the server, as parsed; meanings, units and ranges stand in the
/// table of Flags(), which also makes --help.
struct ServerOptions {
  /// Values of one head, in the order in which they were given; beside them the members hold the
  /// value of all other heads. HeadOptions (head_values.h) brings them together.
  std::vector<HeadValue> head_values;

  std::string model;  ///< Of the only head; several have theirs in `head_values`.
  std::string head_name = "default";
  std::string head_tensor;
  int64_t weights_version = 1;
  std::string weights_root;  ///< Folders with commas between; "none"; empty: see plan.h.
  int64_t valid_vocab = 0;
  bool include_padding = false;

  std::string device = "auto";
  std::string kernel = "auto";
  std::vector<int32_t> gpus;  ///< Empty: auto.
  int64_t shards = 0;         ///< 0: auto.
  int64_t replicas = 0;       ///< 0: auto.
  double watchdog_s = 0;
  std::string exchange = "auto";
  int64_t cpu_threads = 0;

  std::string listen = "127.0.0.1:8470";
  std::string http = "127.0.0.1:9470";
  std::string local = "auto";
  int64_t shared_memory_bytes = int64_t{2} << 30;
  int64_t region_bytes = int64_t{512} << 20;
  bool cuda_ipc = false;
  std::string admin;
  bool insecure = false;
  bool reflection = false;

  int64_t max_message_bytes = int64_t{64} << 20;
  int64_t receive_bytes = int64_t{2} << 30;
  int64_t streams_max = 256;
  int64_t stream_window = 8;
  int64_t request_rows = 65'536;
  int64_t top_k_max = 128;
  int64_t candidates_max = 1 << 20;
  int64_t segments_max = 65'536;

  int64_t batch_rows = 8'192;
  int64_t batch_wait_us = 500;
  int64_t queue_rows = 262'144;
  int64_t queue_bytes = int64_t{1} << 30;
  int64_t queue_requests = 65'536;
  double client_share = 0.5;
  int64_t copy_threads = 2;

  double grace_s = 30;
  std::string log_level = "info";
  std::string log_format = "text";

  std::string config;
  bool dry_run = false;
  bool print_config = false;
  bool version = false;
};

/// One settable thing: a row of the table from which the command line, the environment, the
/// configuration file, --help and --print-config are made.
struct Flag {
  enum class Kind {
    kText,
    kSwitch,   ///< true or false; alone on the command line it is true.
    kInteger,  ///< From `min` to `max`.
    kCount,    ///< As kInteger, and also "auto", which is 0.
    kBytes,    ///< As kInteger, and also as 64KiB, 64MiB, 2GiB.
    kNumber,   ///< A real number from `min` to `max`.
    kChoice,   ///< One of `choices`.
    kAddress,  ///< Text; "none" means empty.
    kGpus,     ///< Different numbers from `min` to `max` with commas between; "auto" means none.
  };

  absl::string_view name;  ///< With dashes; the file and the environment also take underscores.
  absl::string_view group;
  Kind kind = Kind::kText;
  std::variant<std::string ServerOptions::*, bool ServerOptions::*, int64_t ServerOptions::*,
               double ServerOptions::*, std::vector<int32_t> ServerOptions::*>
      member;
  absl::string_view placeholder;  ///< Unit or kind of value, as in --help.
  absl::string_view help;
  double min = 0;
  double max = 0;
  std::vector<absl::string_view> choices = {};
  /// An action of one start, which neither the environment nor a file may ask for.
  bool command_line_only = false;
  /// Also takes NAME=VALUE for the head of that name, and may be repeated for several.
  bool is_of_head = false;
  /// SIGHUP applies a new value; any other needs a restart.
  bool is_reloadable = false;
};

/// All flags, group by group, in the order of --help.
absl::Span<const Flag> Flags();

/// The flag of that name, written with dashes or underscores, or null.
const Flag* FindFlag(absl::string_view name);

/// The flag's name that is nearest to `name` in letters, for messages; never empty.
std::string NearestFlag(absl::string_view name);

/// Sets the flag, for all heads, from text. INVALID_ARGUMENT says what the value must be, without
/// naming the flag.
absl::Status SetFlag(const Flag& flag, absl::string_view text, ServerOptions& options);

/// The shortest text that reads back as `value`.
std::string NumberText(double value);

/// The flag's value as TOML: quoted text, true or false, a number, "64MiB"; an array of such where
/// heads have their own.
std::string FlagValueAsToml(const Flag& flag, const ServerOptions& options);

/// The checks that a range cannot express: more than one flag, names, addresses. INVALID_ARGUMENT
/// or FAILED_PRECONDITION names the flags. What it accepts no part refuses later.
absl::Status CheckServerOptions(const ServerOptions& options);

}  // namespace logprobd
