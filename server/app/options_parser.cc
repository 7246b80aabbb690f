#include "server/app/options_parser.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "server/app/config_sources.h"
#include "server/app/head_values.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

constexpr size_t kHelpColumn = 34;

std::string DefaultNote(const Flag& flag) {
  if (flag.kind == Flag::Kind::kSwitch) {
    return "";
  }
  std::string value = FlagValueAsToml(flag, ServerOptions());
  value = absl::StrReplaceAll(value, {{"\"", ""}});
  const std::string choices =
      flag.choices.empty() ? "" : absl::StrCat(" (", absl::StrJoin(flag.choices, ", "), ")");
  return absl::StrCat(choices, value.empty() ? "" : absl::StrCat(" [default ", value, "]"),
                      flag.is_reloadable ? " (SIGHUP)" : "");
}

/// CLI11 knows the command line only: it splits it and makes --help. File and environment it would
/// put in the wrong order (its file beats its environment), so their values are merged here.
class CommandLine {
 public:
  CommandLine() : app_("Scores tokens against the head of a language model.", "logprobd") {
    app_.set_help_flag("");
    app_.allow_extras();
    app_.get_formatter()->column_width(kHelpColumn);
    for (const Flag& flag : Flags()) {
      AddFlag(flag);
    }
    app_.add_flag("--help,-h", help_, "Print this and stop")->group("Actions");
    app_.footer(
        "Each flag is also a key of the file, with dashes or underscores, and a variable:\n"
        "--batch-rows, batch_rows = 4096, LOGPROBD_BATCH_ROWS. The flag wins over the variable,\n"
        "the variable over the file, the file over the default.\n\n"
        "Several heads: --model policy=DIR --model reference=DIR. --head-tensor, "
        "--weights-version,\n"
        "--valid-vocab, --include-padding, --gpus, --shards and --replicas then take a value for "
        "all\n"
        "or NAME=VALUE for a head, again and again or with commas between: --shards policy=2. In "
        "the\n"
        "file that is text or an array: shards = [\"policy=2\"]. A path with \"=\" in it: "
        "./a=b.\n\n"
        "SIGHUP reads file and variables again and applies what is marked (SIGHUP).\n\n"
        "Exit status: 0 stopped as asked, 1 failed, 2 bad settings, 3 stopped before all work was\n"
        "finished (a second signal, or --grace-s passed).");
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
    const std::string help = absl::StrCat(flag.help, DefaultNote(flag));
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

  /// Underscores in names become dashes, and "--name=" two words: CLI11 takes neither.
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
  std::vector<CLI::Option*> options_;  ///< As Flags().
};

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
  for (const Flag& flag : Flags()) {
    parsed.sources[std::string(flag.name)] = "default";
  }
  parsed.help = command_line.help();
  if (parsed.help) {
    return parsed;
  }
  LOGPROBD_ASSIGN_OR_RETURN(const std::vector<Setting> from_environment,
                            ReadEnvironment(environment));
  // The file's name may come from either; everything else in it counts least.
  ParsedOptions above;
  LOGPROBD_RETURN_IF_ERROR(Apply(from_environment, above));
  LOGPROBD_RETURN_IF_ERROR(Apply(from_flags, above));
  if (!above.options.config.empty()) {
    LOGPROBD_ASSIGN_OR_RETURN(const std::vector<Setting> from_file,
                              ReadConfigFile(above.options.config));
    LOGPROBD_RETURN_IF_ERROR(Apply(from_file, parsed));
  }
  LOGPROBD_RETURN_IF_ERROR(Apply(from_environment, parsed));
  LOGPROBD_RETURN_IF_ERROR(Apply(from_flags, parsed));
  return parsed;
}

std::string HelpText() { return CommandLine().HelpText(); }

std::string ConfigText(const ParsedOptions& parsed) {
  const auto comment = [](std::string source) {  // a file's name may hold anything
    absl::c_replace_if(
        source, [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
    return source;
  };
  std::string text;
  absl::string_view group;
  for (const Flag& flag : Flags()) {
    if (flag.command_line_only || flag.name == "config") {
      continue;
    }
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
