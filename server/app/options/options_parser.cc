#include "server/app/options/options_parser.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/app/options/config_file.h"
#include "server/app/options/flags.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

constexpr size_t kHelpColumn = 34;  // where the help text of a flag begins
constexpr size_t kHelpWidth = 80;
constexpr absl::string_view kNoBreak = "\1";  // a space that Wrapped does not break

/// Returns a sentence that states the valid values of a flag, or "" if every text is valid.
std::string RangeSentence(const Flag& flag) {
  const auto number = [&flag](double value) {
    return flag.kind == Flag::Kind::kBytes ? BytesText(static_cast<int64_t>(value))
                                           : NumberText(value);
  };
  switch (flag.kind) {
    case Flag::Kind::kChoice:
      return absl::StrCat(" One of ", ChoicesText(flag), ".");
    case Flag::Kind::kInteger:
    case Flag::Kind::kBytes:
    case Flag::Kind::kNumber:
      return absl::StrCat(" From", kNoBreak, number(flag.min), kNoBreak, "to", kNoBreak,
                          number(flag.max), ".");
    case Flag::Kind::kCount:
      return absl::StrCat(" Either auto or from ", number(flag.min), " to ", number(flag.max), ".");
    default:
      return "";
  }
}

/// Returns the help of a flag: its meaning, range and default, and whether SIGHUP reloads it.
std::string HelpOf(const Flag& flag) {
  if (flag.command_line_only) return std::string(flag.help);
  const std::string value =
      absl::StrReplaceAll(FlagValueAsToml(flag, ServerOptions()), {{"\"", ""}});
  return absl::StrCat(flag.help, RangeSentence(flag),
                      value.empty() ? "" : absl::StrCat(" Default:", kNoBreak, value, "."),
                      flag.is_reloadable ? absl::StrCat(kNoBreak, "(SIGHUP)") : "");
}

/// Breaks text into lines of at most kHelpWidth characters.
std::string Wrapped(absl::string_view text) {
  std::string lines;
  size_t length = 0;
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    const bool is_first = lines.empty();
    const bool fits = length + 1 + word.size() <= kHelpWidth;
    absl::StrAppend(&lines, is_first ? "" : fits ? " " : "\n", word);
    length = fits && !is_first ? length + 1 + word.size() : word.size();
  }
  return absl::StrReplaceAll(lines, {{kNoBreak, " "}});
}

/// Splits the command line and prints --help with CLI11. CLI11 is not used to read the file and the
/// environment, because it would give the file precedence over the environment.
class CommandLine {
 public:
  CommandLine() : app_("Scores tokens against the head of a language model.", "logprobd") {
    app_.set_help_flag("");
    app_.allow_extras();
    app_.get_formatter()->column_width(kHelpColumn);
    for (const Flag& flag : Flags()) AddFlag(flag);
    app_.add_flag("--help,-h", help_, "Print this help and exit.")->group("Actions");
    app_.footer(
        "Every setting can be given as a flag (--batch-rows 4096), as an environment variable\n"
        "(LOGPROBD_BATCH_ROWS=4096) and as a key of the configuration file (batch_rows = 4096).\n"
        "A flag has precedence over a variable, a variable over the file, and the file over the\n"
        "default. Names may be written with dashes or underscores.\n\n"
        "To serve several heads, repeat --model with names: --model policy=DIR --model "
        "reference=DIR.\n"
        "The settings of a model, and --gpus, --shards and --replicas then take a value for all\n"
        "heads, or NAME=VALUE for one head, which can be repeated or written as a comma-separated\n"
        "list: --shards policy=2. In the file such a value is text or an array: "
        "shards = [\"policy=2\"].\n"
        "Write a path that contains \"=\" as ./a=b.\n\n"
        "On SIGHUP the server reads the file and the variables again and applies the settings "
        "that\n"
        "are marked with (SIGHUP).\n\n"
        "Exit status: 0 the server stopped as requested; 1 it failed, and a restart may help; 2 a\n"
        "setting, or a file that it names, is wrong and only an edit helps; 3 it stopped before "
        "all\n"
        "work was finished (a second signal, or --grace-s passed).");
  }

  absl::StatusOr<std::vector<Setting>> Parse(absl::Span<const std::string> arguments) {
    std::vector<std::string> reversed = Normalized(arguments);
    std::reverse(reversed.begin(), reversed.end());
    try {
      app_.parse(std::move(reversed));
    } catch (const CLI::ParseError& e) {
      return absl::InvalidArgumentError(e.what());
    }
    for (const std::string& extra : app_.remaining()) {
      if (absl::StartsWith(extra, "-")) {
        const std::string name = extra.substr(0, extra.find('='));
        return absl::InvalidArgumentError(absl::StrCat(
            "unknown flag ", name, "; the nearest is --",
            NearestFlag(absl::StripPrefix(absl::StripPrefix(name, "-"), "-")), " (see --help)"));
      }
      return absl::InvalidArgumentError(
          absl::StrCat("unexpected argument \"", extra, "\" (see --help)"));
    }
    std::vector<Setting> settings;
    for (size_t i = 0; i < options_.size(); ++i) {
      if (options_[i]->count() > 1 && !Flags()[i].is_of_head) {
        return absl::InvalidArgumentError(
            absl::StrCat("--", Flags()[i].name, " is given ", options_[i]->count(), " times"));
      }
      if (options_[i]->count() > 0) {
        settings.push_back(
            {&Flags()[i], options_[i]->results(), absl::StrCat("--", Flags()[i].name)});
      }
    }
    return settings;
  }

  bool help() const { return help_; }
  std::string HelpText() const { return app_.help(); }

 private:
  void AddFlag(const Flag& flag) {
    const std::string name = absl::StrCat("--", flag.name);
    const std::string help = Wrapped(HelpOf(flag));
    CLI::Option* option = nullptr;
    if (flag.kind == Flag::Kind::kSwitch) {
      option = app_.add_flag(name, help);
    } else {
      option = app_.add_option(name)->description(help)->option_text(std::string(flag.placeholder));
      option->type_size(1);
    }
    option->group(std::string(flag.group))->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    options_.push_back(option);
  }

  /// Replaces underscores in names by dashes, and "--name=" by two words, as CLI11 requires.
  static std::vector<std::string> Normalized(absl::Span<const std::string> arguments) {
    std::vector<std::string> words;
    for (const std::string& argument : arguments) {
      if (!absl::StartsWith(argument, "--")) {
        words.push_back(argument);
        continue;
      }
      const size_t equals = argument.find('=');
      const std::string name = absl::StrReplaceAll(argument.substr(0, equals), {{"_", "-"}});
      if (equals == std::string::npos) {
        words.push_back(name);
      } else if (equals + 1 == argument.size()) {
        words.insert(words.end(), {name, ""});
      } else {
        words.push_back(absl::StrCat(name, argument.substr(equals)));
      }
    }
    return words;
  }

  CLI::App app_;
  bool help_ = false;
  std::vector<CLI::Option*> options_;  ///< In the order of Flags().
};

constexpr absl::string_view kPrefix = "LOGPROBD_";

/// Variables that the clients read. A shell that sets them may also start a server.
constexpr absl::string_view kClientVariables[] = {
    "LOGPROBD_ADDRESS", "LOGPROBD_TIMEOUT_S", "LOGPROBD_MAX_INFLIGHT",    "LOGPROBD_TRANSPORT",
    "LOGPROBD_TOKEN",   "LOGPROBD_TLS_CA",    "LOGPROBD_TLS_SERVER_NAME",
};

std::string VariableOf(absl::string_view flag) {
  return absl::StrCat(kPrefix, absl::AsciiStrToUpper(absl::StrReplaceAll(flag, {{"-", "_"}})));
}

/// Returns the settings among the process's variables ("NAME=value" each). Returns INVALID_ARGUMENT
/// for a LOGPROBD_ variable that neither the server nor the clients know.
absl::StatusOr<std::vector<Setting>> ReadEnvironment(absl::Span<const std::string> environment) {
  std::vector<Setting> settings;
  for (const std::string& entry : environment) {
    const size_t equals = entry.find('=');
    const std::string name = entry.substr(0, equals);
    absl::string_view suffix = name;
    if (equals == std::string::npos || !absl::ConsumePrefix(&suffix, kPrefix) ||
        absl::c_find(kClientVariables, name) != std::end(kClientVariables)) {
      continue;
    }
    const Flag* const flag = FindFlag(absl::AsciiStrToLower(suffix));
    if (flag == nullptr || VariableOf(flag->name) != name) {
      return absl::InvalidArgumentError(absl::StrCat(
          "environment variable ", name, " is not a setting of logprobd; the nearest is ",
          VariableOf(NearestFlag(absl::AsciiStrToLower(suffix)))));
    }
    if (flag->command_line_only) {
      return absl::InvalidArgumentError(absl::StrCat(
          "environment variable ", name, ": --", flag->name, " works on the command line only"));
    }
    settings.push_back({flag, {entry.substr(equals + 1)}, name});
  }
  return settings;
}

absl::Status Apply(const std::vector<Setting>& settings, ParsedOptions& parsed) {
  for (const Setting& setting : settings) {
    const absl::Status status = SetFlagFromSource(*setting.flag, setting.texts, parsed.options);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(setting.source, " ", status.message()));
    }
    parsed.sources[std::string(setting.flag->name)] = setting.source;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ParsedOptions> ParseOptions(absl::Span<const std::string> arguments,
                                           absl::Span<const std::string> environment) {
  CommandLine command_line;
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<Setting> from_flags, command_line.Parse(arguments));
  ParsedOptions parsed;
  for (const Flag& flag : Flags()) parsed.sources[std::string(flag.name)] = "default";
  parsed.help = command_line.help();
  if (parsed.help) return parsed;
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<Setting> from_environment,
                            ReadEnvironment(environment));
  // The environment and the flags may name the file, and they override its values.
  ParsedOptions overrides;
  LOGPROBD_RETURN_IF_ERROR(Apply(from_environment, overrides));
  LOGPROBD_RETURN_IF_ERROR(Apply(from_flags, overrides));
  if (!overrides.options.config.empty()) {
    LOGPROBD_ASSIGN_OR_RETURN(const std::vector<Setting> from_file,
                              ReadConfigFile(overrides.options.config));
    LOGPROBD_RETURN_IF_ERROR(Apply(from_file, parsed));
  }
  LOGPROBD_RETURN_IF_ERROR(Apply(from_environment, parsed));
  LOGPROBD_RETURN_IF_ERROR(Apply(from_flags, parsed));
  return parsed;
}

std::string HelpText() { return CommandLine().HelpText(); }

std::string ConfigText(const ParsedOptions& parsed) {
  const auto comment = [](std::string source) {  // the name of a file may contain any character
    absl::c_replace_if(
        source, [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
    return source;
  };
  std::string text;
  absl::string_view group;
  for (const Flag& flag : Flags()) {
    if (flag.command_line_only || flag.name == "config") continue;
    if (flag.group != group) {
      absl::StrAppend(&text, text.empty() ? "" : "\n", "# ", flag.group, "\n");
      group = flag.group;
    }
    const auto source = parsed.sources.find(flag.name);
    absl::StrAppend(&text, flag.name, " = ", FlagValueAsToml(flag, parsed.options), "  # ",
                    source == parsed.sources.end() ? "default" : comment(source->second), "\n");
  }
  return text;
}

}  // namespace logprobd
