#include "server/app/head_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// "[head]text" for each part.
std::vector<std::string> Split(absl::string_view flag, absl::string_view text) {
  std::vector<std::string> parts;
  for (const HeadText& part : SplitByHead(*FindFlag(flag), text)) {
    parts.push_back(absl::StrCat("[", part.head, "]", part.text));
  }
  return parts;
}

/// Options with these values, each "flag", "text".
ServerOptions With(const std::vector<std::pair<std::string, std::string>>& values) {
  ServerOptions options;
  for (const auto& [flag, text] : values) {
    const absl::Status status = SetFlagFromSource(*FindFlag(flag), {text}, options);
    EXPECT_TRUE(status.ok()) << flag << " " << status;
  }
  return options;
}

std::string ErrorOf(const std::vector<std::pair<std::string, std::string>>& values) {
  const absl::Status status = CheckServerOptions(With(values));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(SplitByHeadTest, TakesValuesOfHeadsApart) {
  EXPECT_THAT(Split("model", "a=/x"), ElementsAre("[a]/x"));
  EXPECT_THAT(Split("model", "a=/x,b=/y"), ElementsAre("[a]/x", "[b]/y"));
  EXPECT_THAT(Split("model", "a=/x, b =/y"), ElementsAre("[a]/x", "[b]/y"));
  EXPECT_THAT(Split("gpus", "a=0,1,b=2"), ElementsAre("[a]0,1", "[b]2"));
  EXPECT_THAT(Split("gpus", "0,1,b=2,3"), ElementsAre("[]0,1", "[b]2,3"));
  EXPECT_THAT(Split("shards", "2"), ElementsAre("[]2"));
  EXPECT_THAT(Split("shards", ""), ElementsAre("[]"));
  EXPECT_THAT(Split("shards", "a="), ElementsAre("[a]"));
}

TEST(SplitByHeadTest, LeavesPathsWholeThatDoNotBeginWithAName) {
  EXPECT_THAT(Split("model", "/models/a=b,c=d"), ElementsAre("[]/models/a=b,c=d"));
  EXPECT_THAT(Split("model", "./a=b"), ElementsAre("[]./a=b"));
  EXPECT_THAT(Split("model", "=b"), ElementsAre("[]=b"));
  EXPECT_THAT(Split("model", "a,b=c"), ElementsAre("[]a,b=c"));
  EXPECT_THAT(Split("model", "a=./b=c,d"), ElementsAre("[a]./b=c,d"));
}

TEST(SplitByHeadTest, LeavesFlagsThatAreNotOfHeadsAlone) {
  EXPECT_THAT(Split("listen", "a=b,c=d"), ElementsAre("[]a=b,c=d"));
}

TEST(SetFlagFromSourceTest, ReplacesAllThatAWeakerSourceSaid) {
  ServerOptions options = With({{"shards", "4,a=2"}});

  ASSERT_TRUE(SetFlagFromSource(*FindFlag("shards"), {"b=3"}, options).ok());

  EXPECT_EQ(options.shards, 0);
  ASSERT_EQ(options.head_values.size(), 1U);
  EXPECT_EQ(options.head_values[0].head, "b");
  EXPECT_EQ(options.head_values[0].text, "3");
}

TEST(HeadOptionsTest, GivesASingleHeadTheOptionsAsTheyAre) {
  const ServerOptions options = With({{"model", "/x"}, {"head-name", "policy"}});

  const std::vector<ServerOptions> heads = HeadOptions(options);

  ASSERT_EQ(heads.size(), 1U);
  EXPECT_EQ(heads[0].head_name, "policy");
  EXPECT_EQ(heads[0].model, "/x");
  EXPECT_EQ(heads[0].queue_bytes, options.queue_bytes);
}

TEST(HeadOptionsTest, GivesEachHeadItsOwnValuesAndItsPartOfTheBytes) {
  const std::vector<ServerOptions> heads = HeadOptions(With({{"model", "b=/x,a=/y"},
                                                             {"head-tensor", "lm_head,b=score"},
                                                             {"weights-version", "a=7"},
                                                             {"valid-vocab", "b=5"},
                                                             {"include-padding", "a=true"},
                                                             {"gpus", "a=1,0"},
                                                             {"shards", "a=2"},
                                                             {"replicas", "3,a=1"},
                                                             {"queue-bytes", "1MiB"}}));

  ASSERT_EQ(heads.size(), 2U);
  EXPECT_EQ(heads[0].head_name, "b");
  EXPECT_EQ(heads[0].model, "/x");
  EXPECT_EQ(heads[0].head_tensor, "score");
  EXPECT_EQ(heads[0].weights_version, 1);
  EXPECT_EQ(heads[0].valid_vocab, 5);
  EXPECT_FALSE(heads[0].include_padding);
  EXPECT_TRUE(heads[0].gpus.empty());
  EXPECT_EQ(heads[0].shards, 0);
  EXPECT_EQ(heads[0].replicas, 3);
  EXPECT_EQ(heads[0].queue_bytes, 512 << 10);
  EXPECT_EQ(heads[1].head_name, "a");
  EXPECT_EQ(heads[1].head_tensor, "lm_head");
  EXPECT_EQ(heads[1].weights_version, 7);
  EXPECT_TRUE(heads[1].include_padding);
  EXPECT_THAT(heads[1].gpus, ElementsAre(1, 0));
  EXPECT_EQ(heads[1].shards, 2);
  EXPECT_EQ(heads[1].replicas, 1);
  EXPECT_TRUE(heads[1].head_values.empty());
}

TEST(CheckHeadsTest, AcceptsOneNamedHeadAndSeveral) {
  EXPECT_TRUE(CheckServerOptions(With({{"model", "a=/x"}})).ok());
  EXPECT_TRUE(CheckServerOptions(With({{"model", "a=/x,b=/y"}, {"shards", "b=2"}})).ok());
  EXPECT_TRUE(CheckServerOptions(With({{"model", "/x"}, {"shards", "default=2"}})).ok());
}

TEST(CheckHeadsTest, NamesThatCannotBeServedAreRefused) {
  EXPECT_THAT(ErrorOf({{"model", "unknown=/x"}}), StartsWith("--model: a head must not be"));
  EXPECT_THAT(ErrorOf({{"model", "a\x01=/x"}}), HasSubstr("without control characters"));
  EXPECT_THAT(ErrorOf({{"model", absl::StrCat(std::string(129, 'a'), "=/x")}}),
              HasSubstr("must have 1 to 128"));
  EXPECT_THAT(ErrorOf({{"model", "a=,b=/y"}}), HasSubstr("no folder for head \"a\""));
  EXPECT_THAT(ErrorOf({{"model", "a=/x"}, {"head-name", "b"}}), StartsWith("--head-name names"));
}

TEST(CheckHeadsTest, AFolderWithoutANameBesideNamedOnesIsRefused) {
  ServerOptions options;
  ASSERT_TRUE(SetFlagFromSource(*FindFlag("model"), {"a=/x", "/y"}, options).ok());

  EXPECT_THAT(std::string(CheckServerOptions(options).message()),
              AllOf(HasSubstr("/y, beside the heads a"), HasSubstr("write NAME=DIR for each")));
}

TEST(CheckHeadsTest, AHeadTwiceIsRefused) {
  ServerOptions options;

  const absl::Status status = SetFlagFromSource(*FindFlag("model"), {"a=/x", "a=/y"}, options);

  EXPECT_EQ(status.message(), "is given twice for head \"a\"");
}

TEST(CheckHeadsTest, AValueForAHeadThatIsNotThereNamesFlagAndHeads) {
  EXPECT_EQ(ErrorOf({{"model", "a=/x,b=/y"}, {"shards", "c=2"}}),
            "--shards is for a head \"c\", but there is: a, b");
}

TEST(CheckHeadsTest, SettingsOfAHeadThatContradictEachOtherNameIt) {
  EXPECT_THAT(
      ErrorOf({{"model", "a=/x,b=/y"}, {"valid-vocab", "b=5"}, {"include-padding", "true"}}),
      StartsWith("head \"b\": --valid-vocab and --include-padding"));
  EXPECT_THAT(ErrorOf({{"model", "a=/x,b=/y"}, {"gpus", "b=0,1,2"}, {"shards", "2"}}),
              StartsWith("head \"b\": --gpus names 3 GPUs"));
}

TEST(CheckHeadsTest, MoreHeadsThanCanBeServedAreRefused) {
  std::string models = "h0=/x";
  for (int head = 1; head <= 64; ++head) {
    absl::StrAppend(&models, ",h", head, "=/x");
  }

  EXPECT_THAT(ErrorOf({{"model", models}}), HasSubstr("names 65 heads, must be at most 64"));
}

}  // namespace
}  // namespace logprobd
