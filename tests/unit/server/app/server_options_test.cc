#include "server/app/server_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>
#include <utility>

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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

// 0.123456789 was served as 0.123457.
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
      {"0,x,1", "\"x\" is not one"}, {"0,,1", "\"\" is not one"}, {"", "\"\" is not one"},
      {"0;1", "\"0;1\" is not one"}, {"-1", "\"-1\" is not one"}, {"1024", "from 0 to 1023"},
      {"auto,1", "\"auto\" is"},     {"1,2,1", "GPU 1 twice"},    {"2,+2", "\"+2\" is"}};
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

TEST(CheckServerOptionsTest, AcceptsTheDefaultsWithAModel) {
  EXPECT_TRUE(CheckServerOptions(Valid()).ok());
}

TEST(CheckServerOptionsTest, NamesWhatIsMissingOrContradictory) {
  EXPECT_THAT(std::string(CheckServerOptions(ServerOptions()).message()), HasSubstr("--model"));

  ServerOptions padding = Valid();
  padding.valid_vocab = 5;
  padding.include_padding = true;
  EXPECT_THAT(std::string(CheckServerOptions(padding).message()), HasSubstr("--include-padding"));
}

// What follows passed --dry-run, and ended a start after the weight had been read or with the wrong
// exit status.
TEST(CheckServerOptionsTest, TheReceiveQuotaHoldsTwoMessagesAndTheQueue) {
  ServerOptions options = Valid();
  options.max_message_bytes = 1 << 20;
  options.queue_bytes = 1 << 20;
  options.receive_bytes = (2 << 20) - 1;
  EXPECT_THAT(std::string(CheckServerOptions(options).message()), HasSubstr("--receive-bytes"));
  options.receive_bytes = 2 << 20;
  EXPECT_TRUE(CheckServerOptions(options).ok());
  options.queue_bytes = 2 << 20;
  EXPECT_THAT(std::string(CheckServerOptions(options).message()), HasSubstr("--queue-bytes 2MiB"));
}

// `--device auto` would have taken the CPU for it.
TEST(CheckServerOptionsTest, NamedGpusAreAsManyAsReplicasAndShardsUse) {
  ServerOptions options = Valid();
  options.gpus = {0, 1, 2, 3};
  for (const auto& [replicas, shards] :
       {std::pair{0, 0}, {2, 2}, {4, 1}, {1, 4}, {0, 2}, {2, 0}, {4, 0}}) {
    options.replicas = replicas;
    options.shards = shards;
    EXPECT_TRUE(CheckServerOptions(options).ok()) << replicas << " x " << shards;
  }
  for (const auto& [replicas, shards] :
       {std::pair{2, 4}, {5, 0}, {0, 3}, {3, 0}, {1, 2}, {2, 1}, {256, 256}}) {
    options.replicas = replicas;
    options.shards = shards;
    EXPECT_THAT(std::string(CheckServerOptions(options).message()),
                StartsWith("--gpus names 4 GPUs, but --replicas "))
        << replicas << " x " << shards;
  }
  options.device = "cpu";
  EXPECT_THAT(std::string(CheckServerOptions(options).message()),
              StartsWith("--gpus names GPUs, but --device cpu"));
}

TEST(CheckServerOptionsTest, EveryAddressIsReadAndMustBeLoopbackUnlessInsecure) {
  for (const auto& [flag, member] : {std::pair{"--listen", &ServerOptions::listen},
                                     {"--http", &ServerOptions::http},
                                     {"--admin", &ServerOptions::admin}}) {
    ServerOptions options = Valid();
    options.*member = "8470";
    EXPECT_THAT(std::string(CheckServerOptions(options).message()), StartsWith(flag));
    options.*member = "0.0.0.0:8470";
    EXPECT_THAT(std::string(CheckServerOptions(options).message()), StartsWith(flag));
    options.insecure = true;
    EXPECT_TRUE(CheckServerOptions(options).ok()) << flag;
  }
  ServerOptions local = Valid();
  local.local = std::string(100, 'a');  // with ".control" one too many
  EXPECT_THAT(std::string(CheckServerOptions(local).message()), StartsWith("--local"));
}

TEST(CheckServerOptionsTest, CudaIpcNeedsAGpuAndTheControlSocket) {
  ServerOptions options = Valid();
  options.cuda_ipc = true;
  EXPECT_TRUE(CheckServerOptions(options).ok());
  options.local = "";
  EXPECT_THAT(std::string(CheckServerOptions(options).message()), HasSubstr("--local none"));
  options.local = "auto";
  options.device = "cpu";
  EXPECT_THAT(std::string(CheckServerOptions(options).message()), HasSubstr("--device cpu"));
}

TEST(CheckServerOptionsTest, CopyThreadsAreAsManyAsTheBatcherTakes) {
  EXPECT_TRUE(Set("copy-threads", "256").ok());
  EXPECT_FALSE(Set("copy-threads", "257").ok());
}

// Such a head could not be asked for, broke ListHeads, or shared its metrics with all other names.
TEST(CheckServerOptionsTest, AHeadsNameCanBeSentAndCounted) {
  for (const std::string& name :
       {std::string(), std::string(257, 'a'), std::string("a\nb"), std::string("\xFF"),
        std::string("\xC2\x85"), std::string("unknown")}) {
    ServerOptions options = Valid();
    options.head_name = name;
    EXPECT_THAT(std::string(CheckServerOptions(options).message()), StartsWith("--head-name"));
  }
  for (const std::string& name : {std::string(256, 'a'), std::string("Qwen3 \u00E9")}) {
    ServerOptions options = Valid();
    options.head_name = name;
    EXPECT_TRUE(CheckServerOptions(options).ok()) << name;
  }
}

}  // namespace
}  // namespace logprobd
