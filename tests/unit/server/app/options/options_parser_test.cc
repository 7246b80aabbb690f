#include "server/app/options/options_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "server/app/options/flags.h"
#include "tests/support/temp_folder.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using Arguments = std::vector<std::string>;

ParsedOptions Parse(const Arguments& arguments, const Arguments& environment = {}) {
  auto parsed = ParseOptions(arguments, environment);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.ok() ? *std::move(parsed) : ParsedOptions();
}

std::string Error(const Arguments& arguments, const Arguments& environment = {}) {
  const auto parsed = ParseOptions(arguments, environment);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(parsed.status().message());
  EXPECT_THAT(message, Not(HasSubstr("\n")));
  return message;
}

/// Writes a configuration file with this text and returns its path.
std::string FileWith(const std::string& text) {
  static const testing::TempFolder folder;
  return folder.Write("config.toml", text);
}

TEST(OptionsParserTest, StartsFromTheDefaults) {
  const ParsedOptions parsed = Parse({});

  EXPECT_EQ(parsed.options.listen, "127.0.0.1:8470");
  EXPECT_EQ(parsed.options.batch_rows, 8'192);
  EXPECT_EQ(parsed.sources.at("batch-rows"), "default");
}

struct PrecedenceCase {
  const char* name;
  const char* flag;
  const char* variable;
  const char* key;
  int64_t expected;
  const char* source;
};

class PrecedenceTest : public ::testing::TestWithParam<PrecedenceCase> {};

TEST_P(PrecedenceTest, TakesTheStrongestSource) {
  const PrecedenceCase& c = GetParam();
  const std::string file = FileWith(c.key);
  Arguments arguments = {"--config", file};
  if (*c.flag != '\0') {
    arguments.emplace_back(c.flag);
  }

  const ParsedOptions parsed = Parse(arguments, {c.variable, "OTHER=1"});

  EXPECT_EQ(parsed.options.batch_rows, c.expected);
  EXPECT_EQ(parsed.sources.at("batch-rows"), absl::StrReplaceAll(c.source, {{"FILE", file}}));
}

INSTANTIATE_TEST_SUITE_P(
    Sources, PrecedenceTest,
    ::testing::Values(
        PrecedenceCase{"Default", "", "", "", 8'192, "default"},
        PrecedenceCase{"File", "", "", "batch_rows = 1", 1, "batch_rows in FILE"},
        PrecedenceCase{"Variable", "", "LOGPROBD_BATCH_ROWS=2", "", 2, "LOGPROBD_BATCH_ROWS"},
        PrecedenceCase{"Flag", "--batch-rows=3", "", "", 3, "--batch-rows"},
        PrecedenceCase{"VariableOverFile", "", "LOGPROBD_BATCH_ROWS=2", "batch-rows = 1", 2,
                       "LOGPROBD_BATCH_ROWS"},
        PrecedenceCase{"FlagOverFile", "--batch-rows=3", "", "batch_rows = 1", 3, "--batch-rows"},
        PrecedenceCase{"FlagOverVariable", "--batch-rows=3", "LOGPROBD_BATCH_ROWS=2", "", 3,
                       "--batch-rows"},
        PrecedenceCase{"FlagOverAll", "--batch_rows=3", "LOGPROBD_BATCH_ROWS=2", "batch_rows = 1",
                       3, "--batch-rows"}),
    [](const auto& param_info) { return param_info.param.name; });

TEST(OptionsParserTest, TakesTheNameOfTheFileFromTheEnvironment) {
  const std::string file = FileWith("head_name = \"policy\"");

  EXPECT_EQ(Parse({}, {absl::StrCat("LOGPROBD_CONFIG=", file)}).options.head_name, "policy");
}

TEST(OptionsParserTest, TakesEveryFormOfAFlag) {
  EXPECT_EQ(Parse({"--head-name", "a"}).options.head_name, "a");
  EXPECT_EQ(Parse({"--head_name=a"}).options.head_name, "a");
  EXPECT_EQ(Parse({"--http="}).options.http, "");
  EXPECT_EQ(Parse({"--http", "none"}).options.http, "");
  EXPECT_EQ(Parse({"--max-message-bytes", "16MiB"}).options.max_message_bytes, 16 << 20);
  EXPECT_EQ(Parse({"--max-message-bytes=4096"}).options.max_message_bytes, 4'096);
  EXPECT_TRUE(Parse({"--insecure"}).options.insecure);
  EXPECT_TRUE(Parse({"--insecure=true"}).options.insecure);
  EXPECT_FALSE(Parse({"--insecure=false"}, {"LOGPROBD_INSECURE=true"}).options.insecure);
  EXPECT_TRUE(Parse({"--dry-run"}).options.dry_run);
  EXPECT_TRUE(Parse({"-h"}).help);
}

TEST(OptionsParserTest, TakesTheLayoutFromEverySource) {
  const std::string file = FileWith("gpus = \"2,0\"\nshards = 2\nreplicas = \"auto\"\n");

  const ServerOptions from_file = Parse({"--config", file}).options;
  EXPECT_THAT(from_file.gpus, ElementsAre(2, 0));
  EXPECT_EQ(from_file.shards, 2);
  EXPECT_EQ(from_file.replicas, 0);

  const ServerOptions above =
      Parse({"--config", file, "--gpus", "auto", "--replicas=3"}, {"LOGPROBD_SHARDS=auto"}).options;
  EXPECT_THAT(above.gpus, IsEmpty());
  EXPECT_EQ(above.shards, 0);
  EXPECT_EQ(above.replicas, 3);
}

TEST(OptionsParserTest, TakesSeveralHeadsFromEverySource) {
  const std::string file = FileWith("model = [\"a=/x\", \"b=/y\"]\nshards = \"b=2\"\n");
  const std::string names = "a:/x b:/y ";
  const auto heads_of = [](const ServerOptions& options) {
    std::string text;
    for (const ServerOptions& head : HeadOptions(options)) {
      absl::StrAppend(&text, head.head_name, ":", head.model, " ");
    }
    return text;
  };

  EXPECT_EQ(heads_of(Parse({"--config", file}).options), names);
  EXPECT_EQ(heads_of(Parse({}, {"LOGPROBD_MODEL=a=/x,b=/y"}).options), names);
  EXPECT_EQ(heads_of(Parse({"--model=a=/x", "--model", "b=/y"}).options), names);
  EXPECT_EQ(heads_of(Parse({"--config", file, "--model=c=/z"}).options), "c:/z ");
  EXPECT_EQ(heads_of(Parse({"--config", file, "--model=/z"}).options), "default:/z ");
  EXPECT_EQ(HeadOptions(Parse({"--config", file}).options)[1].shards, 2);
  EXPECT_EQ(HeadOptions(Parse({"--config", file, "--shards=auto"}).options)[1].shards, 0);
  EXPECT_TRUE(HeadOptions(Parse({"--config", file, "--include-padding=b=true"}).options)[1]
                  .include_padding);
}

TEST(OptionsParserTest, NamesTheHeadOfAWrongValue) {
  EXPECT_THAT(Error({"--shards", "a=1,b=0"}),
              HasSubstr("--shards is \"0\" for head \"b\": it must be auto or a whole number"));
  EXPECT_THAT(Error({}, {"LOGPROBD_INCLUDE_PADDING=a=maybe"}),
              HasSubstr("LOGPROBD_INCLUDE_PADDING is \"maybe\" for head \"a\": it must be true"));
  EXPECT_THAT(Error({"--gpus=a=1", "--gpus=a=2"}),
              HasSubstr("--gpus is given twice for head \"a\""));
}

TEST(OptionsParserTest, NamesAnUnknownFlagAndTheNearest) {
  EXPECT_THAT(Error({"--bach-rows", "3"}),
              AllOf(HasSubstr("--bach-rows"), HasSubstr("--batch-rows")));
  EXPECT_THAT(Error({"-x"}), HasSubstr("-x"));
  EXPECT_THAT(Error({"folder"}), HasSubstr("\"folder\""));
}

TEST(OptionsParserTest, RefusesAFlagGivenTwiceOrWithoutItsValue) {
  EXPECT_THAT(Error({"--gpus=1", "--gpus=2"}),
              HasSubstr("--gpus is given twice without a head's name"));
  EXPECT_THAT(Error({"--insecure", "--insecure"}), HasSubstr("--insecure is given 2 times"));
  EXPECT_THAT(Error({"--model"}), HasSubstr("--model"));
}

TEST(OptionsParserTest, NamesTheValueTheSourceAndTheRange) {
  EXPECT_THAT(Error({"--batch-rows", "-5"}),
              AllOf(HasSubstr("--batch-rows is \"-5\""), HasSubstr("from 1 to 1048576")));
  EXPECT_THAT(Error({}, {"LOGPROBD_DEVICE=gpu"}),
              AllOf(HasSubstr("LOGPROBD_DEVICE is \"gpu\""), HasSubstr("auto, cpu, cuda")));
  EXPECT_THAT(Error({"--config", FileWith("gpus = 99999999999999999999")}), HasSubstr("gpus in "));
  EXPECT_THAT(Error({}, {"LOGPROBD_GPUS=0,one"}),
              AllOf(HasSubstr("LOGPROBD_GPUS is \"0,one\""), HasSubstr("\"one\" is not a number")));
  EXPECT_THAT(Error({"--shards", "0"}), HasSubstr("it must be auto or a whole number from 1"));
  EXPECT_THAT(Error({"--config", FileWith("grace_s = -1")}),
              AllOf(HasSubstr("grace_s in "), HasSubstr("from 0 to 86400")));
}

TEST(OptionsParserTest, RefusesUnknownVariablesExceptThoseOfTheClients) {
  EXPECT_THAT(Error({}, {"LOGPROBD_BATCHROWS=3"}),
              AllOf(HasSubstr("LOGPROBD_BATCHROWS"), HasSubstr("LOGPROBD_BATCH_ROWS")));
  EXPECT_THAT(Error({}, {"LOGPROBD_BATCH-ROWS=3"}), HasSubstr("LOGPROBD_BATCH-ROWS"));
  EXPECT_THAT(Error({}, {"LOGPROBD_DRY_RUN=true"}), HasSubstr("LOGPROBD_DRY_RUN"));
  EXPECT_THAT(Error({}, {"LOGPROBD_BATCH_ROWS="}), HasSubstr("LOGPROBD_BATCH_ROWS"));

  Parse({}, {"LOGPROBD_ADDRESS=x", "LOGPROBD_TIMEOUT_S=1", "LOGPROBD_MAX_INFLIGHT=2",
             "LOGPROBD_TRANSPORT=tcp", "LOGPROBD_TOKEN=t", "LOGPROBD_TLS_CA=/ca",
             "LOGPROBD_TLS_SERVER_NAME=scorer", "PATH=/bin"});
}

TEST(OptionsParserTest, HelpShowsEveryFlagWithRangeAndDefault) {
  const std::string help = HelpText();

  for (const Flag& flag : Flags()) {
    EXPECT_THAT(help, HasSubstr(absl::StrCat("--", flag.name, flag.placeholder.empty() ? "" : " ",
                                             flag.placeholder)));
    EXPECT_THAT(help, HasSubstr(absl::StrCat("\n", flag.group, ":\n")));
  }
  EXPECT_THAT(help, HasSubstr("Default: 64MiB."));
  EXPECT_THAT(help, HasSubstr("auto, cpu, cuda. Default: auto."));
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(help, '\n'))) {
    EXPECT_LE(line.size(), 120) << line;
  }
}

TEST(OptionsParserTest, PrintedConfigurationHasEveryFlagThatAFileMaySet) {
  const std::string text = ConfigText(Parse({"--model=m"}));

  for (const Flag& flag : Flags()) {
    const bool may_be_set = !flag.command_line_only && flag.name != "config";
    EXPECT_EQ(absl::StrContains("\n" + text, absl::StrCat("\n", flag.name, " = ")), may_be_set)
        << flag.name;
  }
}

TEST(OptionsParserTest, PrintedConfigurationReadsBackAsItself) {
  const ParsedOptions first =
      Parse({"--model=/models/a \"b\"\\c", "--http=none", "--max-message-bytes=5000",
             "--queue-bytes=3GiB", "--client-share=0.25", "--insecure", "--grace-s=1.5",
             "--gpus=3,1", "--shards=2"},
            {"LOGPROBD_TOP_K_MAX=7"});

  const ParsedOptions second = Parse({"--config", FileWith(ConfigText(first))});

  for (const Flag& flag : Flags()) {
    if (flag.name != "config") {
      EXPECT_EQ(FlagValueAsToml(flag, second.options), FlagValueAsToml(flag, first.options))
          << flag.name;
    }
  }
  EXPECT_THAT(ConfigText(first), HasSubstr("top-k-max = 7  # LOGPROBD_TOP_K_MAX\n"));
  EXPECT_THAT(ConfigText(first), HasSubstr("gpus = \"3,1\"  # --gpus\n"));
  EXPECT_THAT(ConfigText(first), HasSubstr("shards = 2  # --shards\n"));
  EXPECT_THAT(ConfigText(first), HasSubstr("replicas = \"auto\"  # default\n"));
  EXPECT_THAT(ConfigText(first), HasSubstr("http = \"none\"  # --http\n"));
  EXPECT_THAT(ConfigText(first), HasSubstr("batch-rows = 8192  # default\n"));
}

TEST(OptionsParserTest, PrintedConfigurationOfSeveralHeadsReadsBackAsItself) {
  const ParsedOptions first =
      Parse({"--model=a=/x \"y\"", "--model=b=./c=d,e", "--shards=2,b=auto", "--gpus=a=0,1,b=2",
             "--weights-version=a=3", "--include-padding=b=true", "--valid-vocab=9"});

  const ParsedOptions second = Parse({"--config", FileWith(ConfigText(first))});

  for (const Flag& flag : Flags()) {
    if (flag.name != "config") {
      EXPECT_EQ(FlagValueAsToml(flag, second.options), FlagValueAsToml(flag, first.options))
          << flag.name;
    }
  }
  EXPECT_THAT(ConfigText(first),
              HasSubstr("model = [\"a=/x \\\"y\\\"\", \"b=./c=d,e\"]  # --model\n"));
  EXPECT_THAT(ConfigText(first), HasSubstr("shards = [\"2\", \"b=auto\"]  # --shards\n"));
  EXPECT_THAT(ConfigText(first), HasSubstr("gpus = [\"a=0,1\", \"b=2\"]  # --gpus\n"));
  EXPECT_THAT(ConfigText(first), HasSubstr("valid-vocab = 9  # --valid-vocab\n"));
  EXPECT_EQ(second.options.shards, 2);
}

TEST(OptionsParserTest, HelpMarksReloadableFlags) {
  EXPECT_THAT(HelpText(), HasSubstr("Default: 262144. (SIGHUP)\n"));
  EXPECT_FALSE(FindFlag("batch-rows")->is_reloadable);
}

TEST(OptionsParserTest, ExampleFileContainsEverySettingAtItsDefault) {
  std::ifstream file(LOGPROBD_EXAMPLE_CONFIG);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  ASSERT_FALSE(text.empty());

  // In the example file a comment that starts with a key shows the default of a setting.
  const ParsedOptions parsed =
      Parse({"--config", FileWith(absl::StrReplaceAll(text, {{"\n#", "\n"}, {"\n# ", "\n# "}}))});

  for (const Flag& flag : Flags()) {
    if (flag.command_line_only || flag.name == "config" || flag.name == "model") {
      continue;
    }
    EXPECT_NE(parsed.sources.at(std::string(flag.name)), "default") << flag.name;
    EXPECT_EQ(FlagValueAsToml(flag, parsed.options), FlagValueAsToml(flag, ServerOptions()));
  }
}

}  // namespace
}  // namespace logprobd
