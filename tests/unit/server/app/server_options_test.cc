#include "server/app/server_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>

namespace logprobd {
namespace {

using ::testing::HasSubstr;

ServerOptions Valid() {
  ServerOptions options;
  options.model = "/models/a";
  return options;
}

absl::Status Set(absl::string_view name, absl::string_view text) {
  ServerOptions options;
  return SetFlag(*FindFlag(name), text, options);
}

TEST(FlagsTest, HaveDistinctNamesAndAText) {
  std::set<absl::string_view> names;
  for (const Flag& flag : Flags()) {
    EXPECT_TRUE(names.insert(flag.name).second) << flag.name;
    EXPECT_FALSE(flag.help.empty()) << flag.name;
    EXPECT_FALSE(flag.group.empty()) << flag.name;
    EXPECT_EQ(flag.kind == Flag::Kind::kSwitch, flag.placeholder.empty()) << flag.name;
    EXPECT_EQ(FindFlag(flag.name), &flag);
  }
}

TEST(FlagsTest, DefaultsLieInTheirRanges) {
  for (const Flag& flag : Flags()) {
    std::string text = FlagValueAsToml(flag, ServerOptions());
    std::erase(text, '"');
    ServerOptions options;
    EXPECT_TRUE(SetFlag(flag, text, options).ok()) << flag.name << " = " << text;
    EXPECT_EQ(FlagValueAsToml(flag, options), FlagValueAsToml(flag, ServerOptions())) << flag.name;
  }
}

TEST(FlagsTest, KeepTheLimitsOfIntegers) {
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

TEST(FlagsTest, FindTheNearestName) {
  EXPECT_EQ(NearestFlag("queue_row"), "queue-rows");
  EXPECT_EQ(NearestFlag("MODLE"), "model");
  EXPECT_FALSE(NearestFlag("").empty());
  EXPECT_FALSE(NearestFlag(std::string(1'000'000, 'x')).empty());
}

TEST(CheckServerOptionsTest, AcceptsTheDefaultsWithAModel) {
  EXPECT_TRUE(CheckServerOptions(Valid()).ok());
}

TEST(CheckServerOptionsTest, NamesWhatIsMissingOrContradictory) {
  EXPECT_THAT(std::string(CheckServerOptions(ServerOptions()).message()), HasSubstr("--model"));

  ServerOptions padding = Valid();
  padding.valid_vocab = 5;
  padding.include_padding = true;
  EXPECT_THAT(std::string(CheckServerOptions(padding).message()), HasSubstr("--include-padding"));

  ServerOptions receive = Valid();
  receive.receive_bytes = 1 << 20;
  EXPECT_THAT(std::string(CheckServerOptions(receive).message()), HasSubstr("--receive-bytes"));

  ServerOptions name = Valid();
  name.head_name = "";
  EXPECT_THAT(std::string(CheckServerOptions(name).message()), HasSubstr("--head-name"));
}

}  // namespace
}  // namespace logprobd
