#include "server/weights/hub_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/weights/allowed_roots.h"
#include "server/weights/head_weights.h"
#include "tests/support/model_folder.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

namespace fs = std::filesystem;

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::MakeZeroTensor;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;

const std::string kCommit = "0123456789abcdef0123456789abcdef01234567";
const std::string kConfig = R"({"hidden_size":4,"vocab_size":5})";

/// A cache with the layout of huggingface_hub: files of a snapshot are links to blobs.
class HubCacheTest : public ::testing::Test {
 protected:
  std::string Cache() const { return folder_.PathOf("hub"); }
  std::string Repository() const { return Cache() + "/models--Some--Model-7B"; }
  std::string Snapshot() const { return Repository() + "/snapshots/" + kCommit; }

  void WriteRef(const std::string& text) const {
    folder_.WriteFile("hub/models--Some--Model-7B/refs/main", text);
  }

  /// Writes `content` as a blob, in the model's folder or, if `is_shared`, in that of the cache.
  void AddFile(const std::string& name, const std::string& content, bool is_shared = false) const {
    const std::string blob = is_shared ? "hub/blobs/ab/" + name : "hub/blob-of-" + name;
    folder_.WriteFile(blob, content);
    fs::create_directories(Repository() + "/blobs");
    fs::create_directories(fs::path(Snapshot() + "/" + name).parent_path());
    if (is_shared) {
      fs::create_symlink("../../blobs/ab/" + name, Repository() + "/blobs/" + name);
    } else {
      fs::rename(folder_.PathOf(blob), Repository() + "/blobs/" + name);
    }
    fs::create_symlink("../../blobs/" + name, Snapshot() + "/" + name);
  }

  static std::string Weights() {
    return testing::SafetensorsBytes({MakeZeroTensor("lm_head.weight", "BF16", {5, 4})});
  }

  const testing::ModelFolder folder_;
};

TEST_F(HubCacheTest, FindsTheSnapshotOfTheMainBranch) {
  WriteRef(kCommit + "\n");
  AddFile("config.json", kConfig);
  AddFile("model.safetensors", Weights());

  const auto path = FindModel("Some/Model-7B", Cache());

  ASSERT_THAT(path, Succeeds());
  EXPECT_EQ(*path, Snapshot());
  EXPECT_THAT(OpenModelFolder(*path, {}), Succeeds());
}

TEST_F(HubCacheTest, PrefersALocalPathOfThatName) {
  WriteRef(kCommit);
  AddFile("config.json", kConfig);
  folder_.WriteFile("Some/Model-7B/config.json", kConfig);
  const fs::path before = fs::current_path();
  fs::current_path(folder_.path());

  const auto path = FindModel("Some/Model-7B", Cache());

  fs::current_path(before);
  ASSERT_THAT(path, Succeeds());
  EXPECT_EQ(*path, "Some/Model-7B");
}

TEST_F(HubCacheTest, LeavesOtherNamesAlone) {
  for (const std::string name :
       {"", "/models/a", "model", "./Some/Model", "a/b/c", "Some/../Model", "Some/Mo--del",
        "Some/Model 7B", "-Some/Model", "../Model", "Some/"}) {
    const auto path = FindModel(name, Cache());
    ASSERT_THAT(path, Succeeds()) << name;
    EXPECT_EQ(*path, name);
  }
}

TEST_F(HubCacheTest, SaysHowToFetchAModelThatIsNotThere) {
  const auto none = FindModel("Some/Model-7B", Cache());
  WriteRef(kCommit);  // without a snapshot
  const auto empty = FindModel("Some/Model-7B", Cache());

  for (const auto& path : {none, empty}) {
    EXPECT_THAT(path, Fails(kNotFound, "'" + Cache() + "'"));
    EXPECT_THAT(path, Fails(kNotFound,
                            "hf download Some/Model-7B config.json && hf download Some/Model-7B "
                            "--include 'model.safetensors*'"));
    EXPECT_THAT(path, Fails(kNotFound, "logprobctl export-head"));
  }
  EXPECT_THAT(FindModel("Some/Model-7B", ""), Fails(kNotFound, "neither HF_HOME nor HOME is set"));
}

TEST_F(HubCacheTest, AModelsIdHasUpTo96Bytes) {
  const std::string longest = "a/" + std::string(94, 'b');

  EXPECT_THAT(FindModel(longest, Cache()), Fails(kNotFound, "hf download a/b"));
  const auto path = FindModel(longest + "b", Cache());
  ASSERT_THAT(path, Succeeds());
  EXPECT_EQ(*path, longest + "b");
}

TEST_F(HubCacheTest, RefusesARefThatIsNotACommit) {
  for (const std::string& ref : {std::string("../../../etc"), kCommit.substr(1), kCommit + "0",
                                 std::string(40, 'g'), std::string()}) {
    WriteRef(ref);

    EXPECT_THAT(FindModel("Some/Model-7B", Cache()), Fails(kInvalid, "does not contain a commit"))
        << ref;
  }
}

TEST_F(HubCacheTest, NamesTheFilesThatASnapshotLacks) {
  const std::string fetch =
      absl::StrCat("; fetch it with: hf download Some/Model-7B --revision ", kCommit, " ");
  AddFile("model.safetensors.index.json",
          R"({"weight_map":{"lm_head.weight":"model-00002-of-00002.safetensors"}})");
  EXPECT_THAT(OpenModelFolder(Snapshot(), {}), Fails(kNotFound, fetch + "config.json"));

  AddFile("config.json", kConfig);
  EXPECT_THAT(OpenModelFolder(Snapshot(), {}),
              Fails(kNotFound, fetch + "model-00002-of-00002.safetensors"));
  EXPECT_THAT(OpenModelFolder(Snapshot(), {}).status().message(),
              ::testing::Not(::testing::HasSubstr("download it again")));

  fs::remove(Snapshot() + "/model.safetensors.index.json");
  EXPECT_THAT(OpenModelFolder(Snapshot() + "/", {}),
              Fails(kNotFound, fetch + "--include 'model.safetensors*'"));
}

TEST_F(HubCacheTest, SuggestsNoCommandOutsideACacheOrForAnUnusualName) {
  EXPECT_EQ(HubDownloadHint("/models/a", "config.json"), "");
  EXPECT_EQ(HubDownloadHint("/hub/models--a--b/snapshots/main", "config.json"), "");
  EXPECT_EQ(HubDownloadHint("/hub/models--a;b--c/snapshots/" + kCommit, "config.json"), "");
  EXPECT_EQ(HubDownloadHint("/hub/models--a--b/snapshots/" + kCommit, "x;y.safetensors"), "");
  EXPECT_NE(HubDownloadHint("/hub/models--a--b/snapshots/" + kCommit, "x.safetensors"), "");
}

TEST_F(HubCacheTest, NamesTheFoldersThatASnapshotNeeds) {
  AddFile("config.json", kConfig);
  AddFile("model.safetensors", Weights());
  EXPECT_THAT(HubFoldersOf(Snapshot()), ElementsAre(Repository()));
  EXPECT_THAT(HubFoldersOf(Snapshot() + "/model.safetensors"), ElementsAre(Repository()));

  AddFile("other.safetensors", Weights(), /*is_shared=*/true);
  EXPECT_THAT(HubFoldersOf(Snapshot()), ElementsAre(Repository(), Cache() + "/blobs"));
  fs::create_directory_symlink(Snapshot(), folder_.PathOf("link"));
  EXPECT_THAT(HubFoldersOf(folder_.PathOf("link")), ElementsAre(Repository(), Cache() + "/blobs"));
  EXPECT_THAT(HubFoldersOf(folder_.path()), IsEmpty());
  EXPECT_THAT(HubFoldersOf(Repository() + "/blobs"), IsEmpty());
  EXPECT_THAT(HubFoldersOf(folder_.PathOf("other/snapshots/1")), IsEmpty());
  EXPECT_THAT(HubFoldersOf("/absent"), IsEmpty());
}

TEST_F(HubCacheTest, OpensASnapshotWithinItsFolders) {
  AddFile("config.json", kConfig);
  AddFile("model.safetensors", Weights(), /*is_shared=*/true);
  folder_.WriteFile("hub/models--Other--Model/config.json", kConfig);
  const auto roots =
      std::make_shared<const AllowedRoots>(*AllowedRoots::Create(HubFoldersOf(Snapshot())));

  EXPECT_THAT(OpenModelFolder(Snapshot(), {.roots = roots}), Succeeds());
  EXPECT_THAT(OpenModelFolder(Cache() + "/models--Other--Model", {.roots = roots}),
              Fails(absl::StatusCode::kPermissionDenied, "not below an allowed root"));
}

TEST(HubCacheFolderTest, IsTheFirstThatAVariableNames) {
  const std::vector<std::string> names = {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME",
                                          "XDG_CACHE_HOME", "HOME"};
  std::vector<std::string> before;
  for (const std::string& name : names) {
    const char* const value = std::getenv(name.c_str());
    before.emplace_back(value == nullptr ? "" : value);
    unsetenv(name.c_str());
  }

  EXPECT_EQ(HubCacheFolder(), "");
  setenv("HOME", "/home/a", 1);
  EXPECT_EQ(HubCacheFolder(), "/home/a/.cache/huggingface/hub");
  setenv("XDG_CACHE_HOME", "/cache", 1);
  EXPECT_EQ(HubCacheFolder(), "/cache/huggingface/hub");
  setenv("HF_HOME", "/hf", 1);
  EXPECT_EQ(HubCacheFolder(), "/hf/hub");
  setenv("HUGGINGFACE_HUB_CACHE", "/old", 1);
  EXPECT_EQ(HubCacheFolder(), "/old");
  setenv("HF_HUB_CACHE", "/new", 1);
  EXPECT_EQ(HubCacheFolder(), "/new");

  for (size_t i = 0; i < names.size(); ++i) {
    if (before[i].empty()) {
      unsetenv(names[i].c_str());
    } else {
      setenv(names[i].c_str(), before[i].c_str(), 1);
    }
  }
}

}  // namespace
}  // namespace logprobd
