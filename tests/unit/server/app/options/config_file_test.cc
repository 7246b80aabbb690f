#include "server/app/options/config_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "tests/support/temp_folder.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

absl::StatusOr<std::vector<Setting>> Read(const std::string& text) {
  const testing::TempFolder folder;
  return ReadConfigFile(folder.Write("config.toml", text));
}

std::string ErrorOf(const std::string& text) {
  const auto settings = Read(text);
  EXPECT_EQ(settings.status().code(), absl::StatusCode::kInvalidArgument) << text;
  const std::string message(settings.status().message());
  EXPECT_THAT(message, AllOf(HasSubstr("configuration file /"), Not(HasSubstr("\n"))));
  return message;
}

TEST(ConfigFileTest, ReadsEveryKindOfValue) {
  const auto settings = Read(
      "# a comment\nbatch_rows = 1_024\nclient-share = 0.5\ninsecure = true\n"
      "max_message_bytes = \"1MiB\"\nmodel = 'C:\\x'\nqueue_bytes = 4096\n"
      "gpus = 2\nshards = \"auto\"\nreplicas = 4\n");

  ASSERT_TRUE(settings.ok()) << settings.status();
  std::string text;
  for (const Setting& setting : *settings) {
    absl::StrAppend(&text, setting.flag->name, "=", absl::StrJoin(setting.texts, "|"), " ");
  }
  EXPECT_EQ(text,
            "batch-rows=1024 client-share=0.5 gpus=2 insecure=true max-message-bytes=1MiB "
            "model=C:\\x queue-bytes=4096 replicas=4 shards=auto ");
}

TEST(ConfigFileTest, KeepsAllDigitsOfANumber) {
  const auto settings = Read("client-share = 0.123456789\ngrace-s = 0.1\n");

  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ((*settings)[0].texts.front(), "0.123456789");
  EXPECT_EQ((*settings)[1].texts.front(), "0.1");
}

TEST(ConfigFileTest, AcceptsAnEmptyFile) { EXPECT_TRUE(Read("").ok()); }

TEST(ConfigFileTest, NamesAnUnknownKeyAndTheNearest) {
  EXPECT_THAT(ErrorOf("bach_rows = 1"), AllOf(HasSubstr("bach_rows"), HasSubstr("batch-rows")));
  EXPECT_THAT(ErrorOf("\"a\\nb\" = 1"), HasSubstr("unknown"));
  EXPECT_THAT(ErrorOf("[server]\nlisten = \"a\""), HasSubstr("key server is unknown"));
}

TEST(ConfigFileTest, NamesAKeyOfTheWrongType) {
  EXPECT_THAT(ErrorOf("batch_rows = \"8\""),
              HasSubstr("key batch_rows is a string, but must be a whole number"));
  EXPECT_THAT(ErrorOf("batch_rows = 8.0"), HasSubstr("a number with a decimal point"));
  EXPECT_THAT(ErrorOf("insecure = 1"), HasSubstr("but must be true or false"));
  EXPECT_THAT(ErrorOf("listen = [\"a\"]"), HasSubstr("is an array, but must be a string"));
  EXPECT_THAT(ErrorOf("max_message_bytes = 1.5"), HasSubstr("64MiB"));
  EXPECT_THAT(ErrorOf("gpus = [0, 1]"),
              HasSubstr("is an array, but must be a string such as \"0,1\" or \"auto\""));
  EXPECT_THAT(ErrorOf("shards = 2.0"), HasSubstr("must be a whole number or \"auto\""));
  EXPECT_THAT(ErrorOf("model = 1979-05-27"), HasSubstr("is a date or time"));
}

TEST(ConfigFileTest, ReadsValuesOfHeadsAsTextAndAsArrays) {
  const auto settings = Read(
      "model = [\"a=/x\", \"b=/y\"]\nshards = \"a=2,b=1\"\nweights-version = \"a=7\"\n"
      "include-padding = [\"b=true\"]\n");

  ASSERT_TRUE(settings.ok()) << settings.status();
  std::string text;
  for (const Setting& setting : *settings) {
    absl::StrAppend(&text, setting.flag->name, ":", absl::StrJoin(setting.texts, "|"), " ");
  }
  EXPECT_EQ(text, "include-padding:b=true model:a=/x|b=/y shards:a=2,b=1 weights-version:a=7 ");
}

TEST(ConfigFileTest, AcceptsOnlyArraysOfStringsForFlagsOfHeads) {
  EXPECT_THAT(ErrorOf("shards = [2]"), HasSubstr("or an array of strings such as \"NAME=VALUE\""));
  EXPECT_THAT(ErrorOf("model = []"), HasSubstr("is an array"));
  EXPECT_THAT(ErrorOf("model = [\"a=/x\", 3]"), HasSubstr("is an array"));
  EXPECT_THAT(ErrorOf("weights-version = \"7\""), HasSubstr("is a string, but must be a whole"));
  EXPECT_THAT(ErrorOf("batch-rows = \"a=7\""), HasSubstr("is a string, but must be a whole"));
}

TEST(ConfigFileTest, RefusesTheSameKeyTwice) {
  EXPECT_THAT(ErrorOf("batch_rows = 1\nbatch_rows = 2\n"), HasSubstr("batch_rows"));
  EXPECT_THAT(ErrorOf("batch_rows = 1\nbatch-rows = 2\n"), HasSubstr("batch-rows is set twice"));
}

TEST(ConfigFileTest, RefusesActionsOfTheCommandLine) {
  EXPECT_THAT(ErrorOf("dry_run = true"), HasSubstr("--dry-run cannot be set in a file"));
  EXPECT_THAT(ErrorOf("config = \"other.toml\""), HasSubstr("--config cannot be set in a file"));
}

TEST(ConfigFileTest, RefusesTextThatIsNotToml) {
  for (const char* text :
       {"batch_rows", "batch_rows =", "= 3", "model = \"open", "[", "\x01\x02"}) {
    const auto settings = Read(text);
    EXPECT_EQ(settings.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(settings.status().message()), Not(HasSubstr("\n")));
  }
}

TEST(ConfigFileTest, SaysThatAFileDoesNotExistOrIsNotRegular) {
  const testing::TempFolder folder;
  EXPECT_EQ(ReadConfigFile(folder.path("missing")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadConfigFile(folder.path()).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadConfigFile("/dev/zero").status().code(), absl::StatusCode::kInvalidArgument);
  const std::string fifo = folder.path("fifo");
  mkfifo(fifo.c_str(), 0600);
  EXPECT_EQ(ReadConfigFile(fifo).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace logprobd
