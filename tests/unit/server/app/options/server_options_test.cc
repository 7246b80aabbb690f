#include "server/app/options/server_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/app/options/flags.h"
#include "server/base/log.h"
#include "server/engine/engines.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

ServerOptions Valid() {
  ServerOptions options;
  options.model = "/models/a";
  return options;
}

/// Returns options with these values, each a pair of flag and text.
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

// Regression: these settings passed --dry-run, but the start failed after the weight had been read,
// or with the wrong exit status.
TEST(CheckServerOptionsTest, RequiresReceiveBytesForTwoMessagesAndTheQueue) {
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

// Regression: `--device auto` fell back to the CPU.
TEST(CheckServerOptionsTest, RequiresAsManyGpusAsReplicasAndShardsUse) {
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
  options.device = Device::kCpu;
  EXPECT_THAT(std::string(CheckServerOptions(options).message()),
              StartsWith("--gpus contradicts --device cpu"));
}

TEST(CheckServerOptionsTest, RequiresLoopbackAddressesUnlessInsecure) {
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
    EXPECT_THAT(InsecureListeners(options), ElementsAre(flag));
  }
  ServerOptions local = Valid();
  local.local = std::string(100, 'a');  // one byte too long with ".control"
  EXPECT_THAT(std::string(CheckServerOptions(local).message()), StartsWith("--local"));
}

TEST(CheckServerOptionsTest, APublicHttpAddressNeedsHttpsAndTokens) {
  ServerOptions options = Valid();
  options.http = "https://127.0.0.1:9470";
  EXPECT_EQ(std::string(CheckServerOptions(options).message()),
            "--http: https://127.0.0.1:9470 needs --tls-cert and --tls-key, too");
  options.tls_cert = "/cert";
  options.tls_key = "/key";
  EXPECT_TRUE(CheckServerOptions(options).ok());
  options.http = "https://0.0.0.0:9470";
  options.tls_client_ca = "/ca";  // HTTP takes no client certificates
  EXPECT_THAT(std::string(CheckServerOptions(options).message()),
              AllOf(StartsWith("--http"), HasSubstr("without authentication over TLS")));
  options.tokens = "/tokens.toml";
  EXPECT_TRUE(CheckServerOptions(options).ok());
  EXPECT_THAT(InsecureListeners(options), IsEmpty());
  options.http = "0.0.0.0:9470";
  for (const bool insecure : {false, true}) {
    options.insecure = insecure;
    EXPECT_THAT(std::string(CheckServerOptions(options).message()),
                HasSubstr("write https://0.0.0.0:9470"));
  }
  options.http = "127.0.0.1:9470";  // TLS and tokens of gRPC leave loopback plain
  options.insecure = false;
  EXPECT_TRUE(CheckServerOptions(options).ok());
}

TEST(CheckServerOptionsTest, AdminIsAUnixSocketOrNeedsAuthentication) {
  ServerOptions options = Valid();
  for (const char* const path : {"", kAutoPath, "unix:/run/logprobd/admin.sock"}) {
    options.admin = path;
    EXPECT_TRUE(CheckServerOptions(options).ok()) << path;
  }
  options.admin = "unix:admin.sock";
  EXPECT_THAT(std::string(CheckServerOptions(options).message()),
              AllOf(StartsWith("--admin"), HasSubstr("absolute path")));
  options.admin = "127.0.0.1:8471";
  EXPECT_THAT(
      std::string(CheckServerOptions(options).message()),
      AllOf(StartsWith("--admin"), HasSubstr("every user of this host"), HasSubstr("Unix socket")));
  options.tls_cert = "/cert";
  options.tls_key = "/key";
  EXPECT_FALSE(CheckServerOptions(options).ok());
  options.tokens = "/tokens.toml";
  EXPECT_TRUE(CheckServerOptions(options).ok());
  options.tokens = "";
  options.tls_client_ca = "/ca";
  EXPECT_TRUE(CheckServerOptions(options).ok());
  EXPECT_THAT(InsecureListeners(options), IsEmpty());
}

TEST(PublicGrpcListenersTest, AreThoseThatOtherHostsMayReach) {
  ServerOptions options = Valid();
  for (const char* const admin : {"", kAutoPath, "unix:/run/logprobd/admin.sock", "[::1]:8471"}) {
    options.admin = admin;
    EXPECT_THAT(PublicGrpcListeners(options), IsEmpty()) << admin;
  }
  options.listen = "logprobd.example:8470";
  EXPECT_THAT(PublicGrpcListeners(options), ElementsAre("--listen"));
  options.admin = "[::]:8471";
  EXPECT_THAT(PublicGrpcListeners(options), ElementsAre("--listen", "--admin"));
}

TEST(CheckServerOptionsTest, RequiresAGpuAndTheControlSocketForCudaIpc) {
  ServerOptions options = Valid();
  options.cuda_ipc = true;
  EXPECT_TRUE(CheckServerOptions(options).ok());
  options.local = "";
  EXPECT_THAT(std::string(CheckServerOptions(options).message()), HasSubstr("--local none"));
  options.local = "auto";
  options.device = Device::kCpu;
  EXPECT_THAT(std::string(CheckServerOptions(options).message()), HasSubstr("--device cpu"));
}

// Regression: requests could not name such a head, or it broke ListHeads, or it shared its metrics
// with unknown names.
TEST(CheckServerOptionsTest, RequiresHeadNamesThatRequestsAndMetricsCanCarry) {
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

TEST(HeadOptionsTest, GivesASingleHeadTheOptionsUnchanged) {
  const ServerOptions options = With({{"model", "/x"}, {"head-name", "policy"}});

  const std::vector<ServerOptions> heads = HeadOptions(options);

  ASSERT_EQ(heads.size(), 1U);
  EXPECT_EQ(heads[0].head_name, "policy");
  EXPECT_EQ(heads[0].model, "/x");
  EXPECT_EQ(heads[0].queue_bytes, options.queue_bytes);
}

TEST(HeadOptionsTest, GivesEachHeadItsOwnValuesAndItsShareOfTheQueueBytes) {
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

TEST(CheckHeadsTest, RefusesNamesThatCannotBeServed) {
  EXPECT_THAT(ErrorOf({{"model", "unknown=/x"}}),
              StartsWith("--model: the name \"unknown\" is reserved"));
  EXPECT_THAT(ErrorOf({{"model", "a\x01=/x"}}), HasSubstr("without control characters"));
  EXPECT_THAT(ErrorOf({{"model", absl::StrCat(std::string(129, 'a'), "=/x")}}),
              HasSubstr("must have 1 to 128"));
  EXPECT_THAT(ErrorOf({{"model", "a=,b=/y"}}), HasSubstr("no folder for head \"a\""));
  EXPECT_THAT(ErrorOf({{"model", "a=/x"}, {"head-name", "b"}}),
              StartsWith("--head-name cannot be combined"));
}

TEST(CheckHeadsTest, RefusesAFolderWithoutANameNextToNamedOnes) {
  ServerOptions options;
  ASSERT_TRUE(SetFlagFromSource(*FindFlag("model"), {"a=/x", "/y"}, options).ok());

  EXPECT_THAT(std::string(CheckServerOptions(options).message()),
              AllOf(HasSubstr("/y without a name, but also the named heads a"),
                    HasSubstr("write NAME=DIR for each")));
}

TEST(CheckHeadsTest, RefusesTheSameHeadTwice) {
  ServerOptions options;

  const absl::Status status = SetFlagFromSource(*FindFlag("model"), {"a=/x", "a=/y"}, options);

  EXPECT_EQ(status.message(), "is given twice for head \"a\"");
}

TEST(CheckHeadsTest, NamesFlagAndHeadsForAValueOfAnUnknownHead) {
  EXPECT_EQ(ErrorOf({{"model", "a=/x,b=/y"}, {"shards", "c=2"}}),
            "--shards has a value for head \"c\", but the heads are: a, b");
}

TEST(CheckHeadsTest, NamesTheHeadWhoseSettingsContradictEachOther) {
  EXPECT_THAT(
      ErrorOf({{"model", "a=/x,b=/y"}, {"valid-vocab", "b=5"}, {"include-padding", "true"}}),
      StartsWith("head \"b\": --valid-vocab and --include-padding"));
  EXPECT_THAT(ErrorOf({{"model", "a=/x,b=/y"}, {"gpus", "b=0,1,2"}, {"shards", "2"}}),
              StartsWith("head \"b\": --gpus names 3 GPUs"));
}

TEST(CheckHeadsTest, RefusesTransformsThatCannotBeComputed) {
  EXPECT_THAT(ErrorOf({{"model", "/x"}, {"softcap", "-0.5"}}), StartsWith("--softcap is -0.5"));
  EXPECT_THAT(ErrorOf({{"model", "/x"}, {"softcap", "1e-39"}}), StartsWith("--softcap is 1e-39"));
  EXPECT_THAT(ErrorOf({{"model", "/x"}, {"logit-scale", "1e-39"}}),
              StartsWith("--logit-scale is 1e-39"));
  for (const std::string softcap : {"-1", "0", "30"}) {
    EXPECT_TRUE(CheckServerOptions(With({{"model", "/x"}, {"softcap", softcap}})).ok());
  }
}

TEST(CheckHeadsTest, RefusesMoreHeadsThanTheLimit) {
  std::string models = "h0=/x";
  for (int head = 1; head <= 64; ++head) {
    absl::StrAppend(&models, ",h", head, "=/x");
  }

  EXPECT_THAT(ErrorOf({{"model", models}}), HasSubstr("names 65 heads, but at most 64"));
}

TEST(ReloadTest, AppliesNothingIfNothingHasChanged) {
  const auto reload = PlanReload(Valid(), Valid(), Valid());

  ASSERT_TRUE(reload.ok()) << reload.status();
  EXPECT_THAT(reload->applied, IsEmpty());
  EXPECT_THAT(reload->needs_restart, IsEmpty());
}

TEST(ReloadTest, AppliesReloadableFlagsAndNamesTheOthers) {
  ServerOptions next = Valid();
  next.model = "/models/b";
  next.queue_rows = 7;
  next.log_level = LogLevel::kDebug;
  next.batch_rows = 5;
  next.head_values = {{"shards", "default", "2"}};

  const auto reload = PlanReload(Valid(), Valid(), next);

  ASSERT_TRUE(reload.ok()) << reload.status();
  EXPECT_THAT(reload->applied, ElementsAre("queue-rows", "log-level"));
  EXPECT_THAT(reload->needs_restart, ElementsAre("model", "shards", "batch-rows"));
  EXPECT_EQ(reload->options.queue_rows, 7);
  EXPECT_EQ(reload->options.log_level, LogLevel::kDebug);
  EXPECT_EQ(reload->options.model, "/models/a");
  EXPECT_EQ(reload->options.batch_rows, 8'192);
  EXPECT_THAT(reload->options.head_values, IsEmpty());
}

TEST(ReloadTest, AppliesEveryReloadableFlag) {
  ServerOptions next = Valid();
  next.stream_window = 2;
  next.request_rows = 3;
  next.top_k_max = 4;
  next.candidates_max = 5;
  next.segments_max = 6;
  next.batch_wait_us = 7;
  next.queue_rows = 8;
  next.queue_bytes = 9'000;
  next.queue_requests = 10;
  next.client_share = 0.25;
  next.grace_s = 12;
  next.log_level = LogLevel::kError;

  const auto reload = PlanReload(Valid(), Valid(), next);

  ASSERT_TRUE(reload.ok()) << reload.status();
  EXPECT_THAT(reload->needs_restart, IsEmpty());
  size_t num_reloadable = 0;
  for (const Flag& flag : Flags()) {
    num_reloadable += flag.is_reloadable ? 1 : 0;
    EXPECT_EQ(FlagValueAsToml(flag, reload->options), FlagValueAsToml(flag, next)) << flag.name;
  }
  EXPECT_EQ(reload->applied.size(), num_reloadable);
}

TEST(ReloadTest, AppliesNoLargerTopKThanTheWorkspaceHolds) {
  ServerOptions start = Valid();
  start.top_k_max = 50;
  ServerOptions current = start;
  current.top_k_max = 10;
  ServerOptions next = start;

  EXPECT_EQ(PlanReload(start, current, next)->options.top_k_max, 50);
  next.top_k_max = 51;
  const auto reload = PlanReload(start, current, next);

  ASSERT_TRUE(reload.ok()) << reload.status();
  EXPECT_EQ(reload->options.top_k_max, 10);
  EXPECT_THAT(reload->needs_restart, ElementsAre("top-k-max above 50"));
}

TEST(ReloadTest, RefusesSettingsThatContradictThoseThatNeedARestart) {
  ServerOptions next = Valid();
  next.queue_bytes = int64_t{3} << 30;
  next.receive_bytes = int64_t{4} << 30;  // needs a restart, so 2 GiB stay in force

  const auto reload = PlanReload(Valid(), Valid(), next);

  EXPECT_EQ(reload.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(reload.status().message()), HasSubstr("--queue-bytes 3GiB"));
}

}  // namespace
}  // namespace logprobd
