#include "server/app/options/part_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/model_folder.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(PartOptionsTest, PublishesNoLargerLimitsThanOneClientMayQueue) {
  ServerOptions options;
  EXPECT_EQ(LimitsOf(options).request_rows_max, 65'536);
  EXPECT_EQ(LimitsOf(options).message_bytes_max, 64 << 20);

  options.queue_rows = 1'000;
  options.queue_bytes = 10'000;
  EXPECT_EQ(LimitsOf(options).request_rows_max, 500);
  EXPECT_EQ(LimitsOf(options).message_bytes_max, 5'000);

  options.queue_rows = 1;
  EXPECT_EQ(LimitsOf(options).request_rows_max, 1);
}

TEST(PartOptionsTest, TranslatesSettingsIntoTheOptionsOfTheParts) {
  ServerOptions options;
  options.device = Device::kCuda;
  options.gpus = {3, 2};
  options.shards = 2;
  options.replicas = 1;
  options.watchdog_s = 0.5;
  options.exchange = Exchange::kNccl;
  options.batch_rows = 77;
  options.batch_wait_us = 9;
  options.valid_vocab = 11;
  options.weights_version = 4;

  EXPECT_EQ(EngineOptionsOf(options).device, Device::kCuda);
  EXPECT_THAT(EngineOptionsOf(options).gpus, ElementsAre(3, 2));
  EXPECT_EQ(EngineOptionsOf(options).shards, 2);
  EXPECT_EQ(EngineOptionsOf(options).replicas, 1);
  EXPECT_EQ(BatchTimeMaxOf(options, Device::kCpu), absl::Milliseconds(500));
  EXPECT_EQ(BatchTimeMaxOf(options, Device::kCuda), absl::Milliseconds(500));
  EXPECT_EQ(HangTimeMaxOf(options), absl::Milliseconds(6'500));
  EXPECT_EQ(HangTimeMaxOf(ServerOptions()), absl::Seconds(126));
  EXPECT_EQ(EngineOptionsOf(options).exchange, Exchange::kNccl);
  EXPECT_EQ(EngineOptionsOf(options).batch_rows_max, 77);
  EXPECT_EQ(BatcherOptionsOf(options).batch_rows_max, 77);
  EXPECT_EQ(BatcherOptionsOf(options).batch_wait_max, absl::Microseconds(9));
  EXPECT_EQ(ModelOptionsOf(options).valid_vocab, 11);
  EXPECT_EQ(ModelOptionsOf(options).weights_version, 4U);
  EXPECT_FALSE(ModelOptionsOf(ServerOptions()).valid_vocab.has_value());
  EXPECT_EQ(EngineOptionsOf(ServerOptions()).device, Device::kAuto);
  EXPECT_THAT(EngineOptionsOf(ServerOptions()).gpus, IsEmpty());
  EXPECT_EQ(EngineOptionsOf(ServerOptions()).exchange, Exchange::kAuto);
  EXPECT_EQ(BatchTimeMaxOf(ServerOptions(), Device::kCuda), absl::Seconds(120));
  EXPECT_EQ(BatchTimeMaxOf(ServerOptions(), Device::kCpu), absl::InfiniteDuration());
}

TEST(PartOptionsTest, TakesTheStateFolderFromTheFlagOrFromSystemd) {
  ServerOptions options;
  unsetenv("STATE_DIRECTORY");
  EXPECT_EQ(EngineOptionsOf(options).state_dir, "");

  setenv("STATE_DIRECTORY", "/var/lib/logprobd:/var/lib/other", 1);
  EXPECT_EQ(EngineOptionsOf(options).state_dir, "/var/lib/logprobd");
  options.state_dir = "/srv/state";
  EXPECT_EQ(EngineOptionsOf(options).state_dir, "/srv/state");
  options.state_dir = "";  // --state-dir none
  EXPECT_EQ(EngineOptionsOf(options).state_dir, "");
  unsetenv("STATE_DIRECTORY");
}

TEST(WeightsRootsTest, AreTheParentOfTheModelUnlessItIsTheRoot) {
  const testing::ModelFolder folder;
  folder.WriteFile("model/config.json", "{}");
  folder.WriteFile("other/config.json", "{}");
  ServerOptions options;
  options.model = folder.PathOf("model");

  const auto roots = WeightsRootsOf(options);
  options.model = "/tmp";
  const auto own = WeightsRootsOf(options);

  EXPECT_TRUE((*roots)->CheckPath(folder.PathOf("other")).ok());
  EXPECT_FALSE((*roots)->CheckPath("/etc").ok());
  EXPECT_EQ((*own)->Text(), "'/tmp'");
}

TEST(WeightsRootsTest, AreTheFoldersOfTheFlag) {
  const testing::ModelFolder folder;
  folder.WriteFile("a/x", "");
  folder.WriteFile("b/x", "");
  ServerOptions options;
  options.weights_root = folder.PathOf("a") + "," + folder.PathOf("b");

  EXPECT_EQ((*WeightsRootsOf(options))->Text(),
            "'" + folder.PathOf("a") + "', '" + folder.PathOf("b") + "'");
  options.weights_root = "none";
  EXPECT_EQ(*WeightsRootsOf(options), nullptr);
}

TEST(WeightsRootsTest, ContainTheLinkedFilesOfAModelInHuggingFacesCache) {
  const testing::ModelFolder cache;
  const std::string repository = "models--Some--Model";
  const std::string commit = "0123456789abcdef0123456789abcdef01234567";
  cache.WriteFile(repository + "/blobs/1", "{}");
  cache.WriteFile(repository + "/snapshots/" + commit + "/x", "");
  cache.WriteFile("models--Other--Model/x", "");
  std::filesystem::create_symlink(
      "../../blobs/1", cache.PathOf(repository + "/snapshots/" + commit + "/config.json"));
  ServerOptions options;
  options.model = cache.PathOf(repository + "/snapshots/" + commit);

  const auto roots = WeightsRootsOf(options);

  EXPECT_TRUE((*roots)->CheckPath(options.model + "/config.json").ok());
  EXPECT_FALSE((*roots)->CheckPath(cache.PathOf("models--Other--Model")).ok());
}

TEST(WeightsRootsTest, AreOffIfTheModelDoesNotExist) {
  ServerOptions options;
  options.model = "/absent/model";

  EXPECT_EQ(*WeightsRootsOf(options), nullptr);
}

TEST(WeightsRootsTest, MustExistIfTheFlagNamesThem) {
  ServerOptions options;
  options.weights_root = "/tmp,/absent";

  const absl::Status status = WeightsRootsOf(options).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/absent"));
}

}  // namespace
}  // namespace logprobd
