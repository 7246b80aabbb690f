#include "server/app/options/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::Status Set(absl::string_view name, absl::string_view text) {
  ServerOptions options;
  return SetFlag(*FindFlag(name), text, options);
}

TEST(FlagsTest, HaveDistinctNamesAndHelp) {
  std::set<absl::string_view> names;
  for (const Flag& flag : Flags()) {
    EXPECT_TRUE(names.insert(flag.name).second) << flag.name;
    EXPECT_FALSE(flag.help.empty()) << flag.name;
    EXPECT_FALSE(flag.group.empty()) << flag.name;
    EXPECT_EQ(flag.kind == Flag::Kind::kSwitch, flag.placeholder.empty()) << flag.name;
    EXPECT_EQ(FindFlag(flag.name), &flag);
  }
}

TEST(FlagsTest, HaveDefaultsWithinTheirRanges) {
  for (const Flag& flag : Flags()) {
    std::string text = FlagValueAsToml(flag, ServerOptions());
    std::erase(text, '"');
    ServerOptions options;
    EXPECT_TRUE(SetFlag(flag, text, options).ok()) << flag.name << " = " << text;
    EXPECT_EQ(FlagValueAsToml(flag, options), FlagValueAsToml(flag, ServerOptions())) << flag.name;
  }
}

TEST(FlagsTest, CheckTheRangeOfIntegers) {
  EXPECT_TRUE(Set("batch-rows", "1").ok());
  EXPECT_TRUE(Set("batch-rows", "1048576").ok());
  for (const char* text : {"0", "-1", "1048577", "1.5", "1e3", "", " ", "x", "0x10", "+5", "64KiB",
                           "99999999999999999999"}) {
    EXPECT_FALSE(Set("batch-rows", text).ok()) << text;
  }
}

TEST(FlagsTest, ReadBytesWithAndWithoutAUnit) {
  ServerOptions options;
  const Flag& flag = *FindFlag("queue_bytes");
  ASSERT_TRUE(SetFlag(flag, "3GiB", options).ok());
  EXPECT_EQ(options.queue_bytes, int64_t{3} << 30);
  ASSERT_TRUE(SetFlag(flag, "5000", options).ok());
  EXPECT_EQ(options.queue_bytes, 5'000);
  for (const char* text : {"3GB", "3G", "GiB", "-1KiB", "1.5GiB", "9999999999999GiB", "1KiB KiB"}) {
    EXPECT_FALSE(SetFlag(flag, text, options).ok()) << text;
  }
  EXPECT_EQ(options.queue_bytes, 5'000);
}

TEST(FlagsTest, ReadRealNumbers) {
  EXPECT_TRUE(Set("client-share", "1").ok());
  EXPECT_TRUE(Set("client-share", "0.01").ok());
  for (const char* text : {"0", "1.01", "-0.5", "nan", "inf", "half"}) {
    EXPECT_FALSE(Set("client-share", text).ok()) << text;
  }
}

// Regression: 0.123456789 was printed as 0.123457.
TEST(FlagsTest, PrintRealNumbersWithAllTheirDigits) {
  ServerOptions options;
  options.client_share = 0.123456789;
  EXPECT_EQ(FlagValueAsToml(*FindFlag("client-share"), options), "0.123456789");
  options.client_share = 1.0 / 3;
  EXPECT_EQ(FlagValueAsToml(*FindFlag("client-share"), options), "0.3333333333333333");
  options.grace_s = 30;
  EXPECT_EQ(FlagValueAsToml(*FindFlag("grace-s"), options), "30");
}

TEST(FlagsTest, ReadCountsAndTheWordAuto) {
  ServerOptions options;
  const Flag& flag = *FindFlag("shards");
  ASSERT_TRUE(SetFlag(flag, "4", options).ok());
  EXPECT_EQ(options.shards, 4);
  EXPECT_EQ(FlagValueAsToml(flag, options), "4");
  ASSERT_TRUE(SetFlag(flag, "auto", options).ok());
  EXPECT_EQ(options.shards, 0);
  EXPECT_EQ(FlagValueAsToml(flag, options), "\"auto\"");
  for (const char* text : {"0", "-1", "257", "AUTO", "", "2.0"}) {
    EXPECT_FALSE(SetFlag(flag, text, options).ok()) << text;
  }
}

TEST(FlagsTest, ReadListsOfGpusAndNameTheBadItem) {
  ServerOptions options;
  const Flag& flag = *FindFlag("gpus");
  ASSERT_TRUE(SetFlag(flag, "3, 0,12", options).ok());
  EXPECT_THAT(options.gpus, ElementsAre(3, 0, 12));
  EXPECT_EQ(FlagValueAsToml(flag, options), "\"3,0,12\"");
  const std::pair<const char*, const char*> kBad[] = {
      {"0,x,1", "\"x\" is not a"}, {"0,,1", "\"\" is not a"}, {"", "\"\" is not a"},
      {"0;1", "\"0;1\" is not a"}, {"-1", "\"-1\" is not a"}, {"1024", "from 0 to 1023"},
      {"auto,1", "\"auto\" is"},   {"1,2,1", "GPU 1 twice"},  {"2,+2", "\"+2\" is"}};
  for (const auto& [text, message] : kBad) {
    const absl::Status status = SetFlag(flag, text, options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
  EXPECT_THAT(options.gpus, ElementsAre(3, 0, 12));
  ASSERT_TRUE(SetFlag(flag, "auto", options).ok());
  EXPECT_TRUE(options.gpus.empty());
}

TEST(FlagsTest, FindTheNearestName) {
  EXPECT_EQ(NearestFlag("queue_row"), "queue-rows");
  EXPECT_EQ(NearestFlag("MODLE"), "model");
  EXPECT_FALSE(NearestFlag("").empty());
  EXPECT_FALSE(NearestFlag(std::string(1'000'000, 'x')).empty());
}

TEST(FlagsTest, AllowAsManyCopyThreadsAsTheBatcherTakes) {
  EXPECT_TRUE(Set("copy-threads", "256").ok());
  EXPECT_FALSE(Set("copy-threads", "257").ok());
}

/// Returns "[head]text" for each part.
std::vector<std::string> Split(absl::string_view flag, absl::string_view text) {
  std::vector<std::string> parts;
  for (const HeadText& part : SplitByHead(*FindFlag(flag), text)) {
    parts.push_back(absl::StrCat("[", part.head, "]", part.text));
  }
  return parts;
}

TEST(SplitByHeadTest, SplitsTheValuesOfHeads) {
  EXPECT_THAT(Split("model", "a=/x"), ElementsAre("[a]/x"));
  EXPECT_THAT(Split("model", "a=/x,b=/y"), ElementsAre("[a]/x", "[b]/y"));
  EXPECT_THAT(Split("model", "a=/x, b =/y"), ElementsAre("[a]/x", "[b]/y"));
  EXPECT_THAT(Split("gpus", "a=0,1,b=2"), ElementsAre("[a]0,1", "[b]2"));
  EXPECT_THAT(Split("gpus", "0,1,b=2,3"), ElementsAre("[]0,1", "[b]2,3"));
  EXPECT_THAT(Split("shards", "2"), ElementsAre("[]2"));
  EXPECT_THAT(Split("shards", ""), ElementsAre("[]"));
  EXPECT_THAT(Split("shards", "a="), ElementsAre("[a]"));
}

TEST(SplitByHeadTest, DoesNotSplitPathsThatDoNotBeginWithAName) {
  EXPECT_THAT(Split("model", "/models/a=b,c=d"), ElementsAre("[]/models/a=b,c=d"));
  EXPECT_THAT(Split("model", "./a=b"), ElementsAre("[]./a=b"));
  EXPECT_THAT(Split("model", "=b"), ElementsAre("[]=b"));
  EXPECT_THAT(Split("model", "a,b=c"), ElementsAre("[]a,b=c"));
  EXPECT_THAT(Split("model", "a=./b=c,d"), ElementsAre("[a]./b=c,d"));
}

TEST(SplitByHeadTest, DoesNotSplitFlagsThatHeadsCannotSet) {
  EXPECT_THAT(Split("listen", "a=b,c=d"), ElementsAre("[]a=b,c=d"));
}

TEST(SetFlagFromSourceTest, ReplacesAllValuesOfASourceWithoutPrecedence) {
  ServerOptions options;
  ASSERT_TRUE(SetFlagFromSource(*FindFlag("shards"), {"4,a=2"}, options).ok());

  ASSERT_TRUE(SetFlagFromSource(*FindFlag("shards"), {"b=3"}, options).ok());

  EXPECT_EQ(options.shards, 0);
  ASSERT_EQ(options.head_values.size(), 1U);
  EXPECT_EQ(options.head_values[0].head, "b");
  EXPECT_EQ(options.head_values[0].text, "3");
}

}  // namespace
}  // namespace logprobd
