#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "server/weights/head_weights.h"
#include "tests/support/model_folder.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

namespace fs = std::filesystem;

using testing::MakeZeroTensor;
using testing::ModelFolder;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
constexpr auto kDenied = absl::StatusCode::kPermissionDenied;

const std::string kConfig = R"({"hidden_size":4,"vocab_size":5})";

std::string Weights() {
  return testing::SafetensorsBytes({MakeZeroTensor("lm_head.weight", "BF16", {5, 4})});
}

TEST(ModelPathsTest, AcceptsAFileWithAConfigInTheSameFolder) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("consolidated.safetensors", Weights());

  EXPECT_THAT(OpenModelFolder(folder.PathOf("consolidated.safetensors"), {}), Succeeds());
}

TEST(ModelPathsTest, AcceptsAnIndexOfAnotherName) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("a.safetensors", Weights());
  folder.WriteFile("other.safetensors.index.json",
                   R"({"weight_map":{"lm_head.weight":"a.safetensors"}})");

  EXPECT_THAT(OpenModelFolder(folder.PathOf("other.safetensors.index.json"), {}), Succeeds());
}

TEST(ModelPathsTest, PrefersTheSingleFileToAnIndex) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("model.safetensors", Weights());
  folder.WriteFile("model.safetensors.index.json", "stale");

  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Succeeds());
}

// Regression: a file and an index that disagree were served without a word.
TEST(ModelPathsTest, WarnsOfAnIndexThatPlacesTheHeadElsewhere) {
  const ModelFolder folder;
  folder.WriteConfig(R"({"model_type":"llama","hidden_size":4,"vocab_size":5})");
  folder.WriteFile("model.safetensors", Weights());
  folder.WriteIndex({{"lm_head.weight", "model-00001-of-00002.safetensors"}});

  const auto head = OpenModelFolder(folder.path(), {});
  ASSERT_THAT(head, Succeeds());
  EXPECT_THAT(head->warnings, ::testing::ElementsAre(::testing::HasSubstr("single file is used")));
  EXPECT_EQ(head->weights->info().warnings, head->warnings);

  folder.WriteIndex({{"lm_head.weight", "model.safetensors"}});
  EXPECT_THAT(OpenModelFolder(folder.path(), {})->warnings, ::testing::IsEmpty());
}

TEST(ModelPathsTest, AnIndexThatCannotBeReadSaysNothingAboutTheSingleFile) {
  const ModelFolder folder;
  folder.WriteConfig(R"({"model_type":"llama","hidden_size":4,"vocab_size":5})");
  folder.WriteFile("model.safetensors", Weights());
  fs::create_directory(folder.PathOf("model.safetensors.index.json"));

  const auto head = OpenModelFolder(folder.path(), {});

  ASSERT_THAT(head, Succeeds());
  EXPECT_THAT(head->warnings, ::testing::IsEmpty());
}

TEST(ModelPathsTest, AMissingFolderIsNotFound) {
  const ModelFolder folder;
  EXPECT_THAT(OpenModelFolder(folder.PathOf("none"), {}), Fails(kNotFound, "does not exist"));
  EXPECT_THAT(OpenModelFolder("Some/Model-7B", {}), Fails(kNotFound, "not downloaded by name"));
}

TEST(ModelPathsTest, AnEmptyPathIsInvalid) {
  EXPECT_THAT(OpenModelFolder("", {}), Fails(kInvalid, "empty"));
  EXPECT_THAT(OpenModelFolder(std::string("/tmp\0x", 6), {}), Fails(kInvalid, "NUL"));
}

TEST(ModelPathsTest, AnEmptyFolderSaysWhatIsMissing) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  EXPECT_THAT(OpenModelFolder(folder.path(), {}),
              Fails(kNotFound, "neither model.safetensors nor model.safetensors.index.json"));
}

TEST(ModelPathsTest, AFolderWithoutAConfigSaysSo) {
  const ModelFolder folder;
  folder.WriteFile("model.safetensors", Weights());
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kNotFound, "config.json"));
}

TEST(ModelPathsTest, PickleFilesAreRefusedWithAConversion) {
  for (const std::string name : {"pytorch_model.bin", "consolidated.00.pth", "model.pt"}) {
    const ModelFolder folder;
    folder.WriteConfig(kConfig);
    folder.WriteFile(name, "\x80\x02");

    for (const std::string& path : {folder.path(), folder.PathOf(name)}) {
      const auto head = OpenModelFolder(path, {});
      EXPECT_THAT(head, Fails(kUnimplemented, "'" + name + "'"));
      EXPECT_THAT(head, Fails(kUnimplemented, "python -m logprobd.export_head '" + path + "' OUT"));
    }
  }
}

TEST(ModelPathsTest, GgufFilesAreRefused) {
  const ModelFolder folder;
  folder.WriteFile("model.gguf", "GGUF");
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kUnimplemented, "GGUF"));
  EXPECT_THAT(OpenModelFolder(folder.PathOf("model.gguf"), {}), Fails(kUnimplemented, "GGUF"));
}

TEST(ModelPathsTest, SafetensorsOfAnotherNameAreSuggested) {
  const ModelFolder folder;
  folder.WriteFile("consolidated.safetensors", Weights());
  EXPECT_THAT(OpenModelFolder(folder.path(), {}),
              Fails(kNotFound, "to use 'consolidated.safetensors', give the path of that file"));
}

TEST(ModelPathsTest, AnAdapterIsRecognised) {
  const ModelFolder folder;
  folder.WriteFile("adapter_model.safetensors", Weights());
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kNotFound, "merge it"));
}

TEST(ModelPathsTest, ADownloadCacheIsRecognised) {
  const ModelFolder folder;
  folder.WriteFile("snapshots/1/config.json", kConfig);
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kNotFound, "'snapshots' folder"));
}

TEST(ModelPathsTest, AFileOfAnUnknownKindIsInvalid) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  EXPECT_THAT(OpenModelFolder(folder.PathOf("config.json"), {}),
              Fails(kInvalid, "neither a model folder nor"));
  EXPECT_THAT(OpenModelFolder("/dev/null", {}), Fails(kInvalid, "neither a model folder nor"));
}

TEST(ModelPathsTest, AFifoIsRefusedWithoutWaitingForAWriter) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  ASSERT_EQ(mkfifo(folder.PathOf("model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kInvalid, "not a regular file"));

  const ModelFolder other;
  other.WriteFile("model.safetensors", Weights());
  ASSERT_EQ(mkfifo(other.PathOf("config.json").c_str(), 0600), 0);
  EXPECT_THAT(OpenModelFolder(other.path(), {}), Fails(kInvalid, "not a regular file"));
}

TEST(ModelPathsTest, DevicesAndFoldersInsteadOfFilesAreRefused) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  fs::create_symlink("/dev/zero", folder.PathOf("model.safetensors"));
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kInvalid, "not a regular file"));

  fs::remove(folder.PathOf("model.safetensors"));
  fs::create_directory(folder.PathOf("model.safetensors"));
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kInvalid, "not a regular file"));
}

TEST(ModelPathsTest, DanglingLinksAndLoopsAreNamed) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  fs::create_symlink("gone", folder.PathOf("model.safetensors"));
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kNotFound, "model.safetensors'"));

  fs::remove(folder.PathOf("model.safetensors"));
  fs::create_symlink("model.safetensors", folder.PathOf("model.safetensors"));
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kInvalid, "model.safetensors'"));
}

TEST(ModelPathsTest, APathThatIsALoopOrTooLongIsInvalid) {
  const ModelFolder folder;
  fs::create_symlink("loop", folder.PathOf("loop"));

  EXPECT_THAT(OpenModelFolder(folder.PathOf("loop"), {}), Fails(kInvalid, "loop'"));
  EXPECT_THAT(OpenModelFolder(folder.PathOf(std::string(300, 'x')), {}),
              Fails(kInvalid, "too long"));
}

// Runs the process as user nobody during its lifetime, because root may read everything.
class WithoutPrivileges {
 public:
  WithoutPrivileges() : was_root_(geteuid() == 0) {
    constexpr uid_t kNobody = 65'534;
    EXPECT_TRUE(!was_root_ || seteuid(kNobody) == 0);
  }
  ~WithoutPrivileges() { EXPECT_TRUE(!was_root_ || seteuid(0) == 0); }
  WithoutPrivileges(const WithoutPrivileges&) = delete;
  WithoutPrivileges& operator=(const WithoutPrivileges&) = delete;

 private:
  bool was_root_;
};

TEST(ModelPathsTest, UnreadableFilesAreDenied) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("model.safetensors", Weights());
  chmod(folder.path().c_str(), 0755);
  chmod(folder.PathOf("model.safetensors").c_str(), 0);

  const WithoutPrivileges nobody;
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kDenied, "make it readable"));
}

TEST(ModelPathsTest, UnreadableFoldersAreDenied) {
  const ModelFolder folder;
  folder.WriteConfig(kConfig);
  folder.WriteFile("model.safetensors", Weights());
  chmod(folder.path().c_str(), 0);

  {
    const WithoutPrivileges nobody;
    EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kDenied, "read permission"));
    EXPECT_THAT(OpenModelFolder(folder.PathOf("model.safetensors"), {}), Fails(kDenied, ""));
  }
  chmod(folder.path().c_str(), 0700);
}

// Without one of the permissions, the names in the folder are known or its files can be opened.
TEST(ModelPathsTest, FoldersWithPartOfThePermissionsAreDenied) {
  const ModelFolder listed;
  listed.WriteConfig(kConfig);
  listed.WriteFile("model.safetensors", Weights());
  chmod(listed.path().c_str(), 0444);
  const ModelFolder entered;
  entered.WriteConfig(kConfig);
  chmod(entered.path().c_str(), 0311);

  {
    const WithoutPrivileges nobody;
    EXPECT_THAT(OpenModelFolder(listed.path(), {}), Fails(kDenied, "read permission"));
    EXPECT_THAT(OpenModelFolder(entered.path(), {}), Fails(kDenied, "read permission"));
  }
  chmod(listed.path().c_str(), 0700);
  chmod(entered.path().c_str(), 0700);
}

TEST(ModelPathsTest, AConfigBeyondTheLimitIsRefused) {
  const ModelFolder folder;
  folder.WriteFile("model.safetensors", Weights());
  folder.WriteConfig(kConfig + std::string((16 << 20) - kConfig.size(), ' '));
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Succeeds());
  folder.WriteConfig("");
  fs::resize_file(folder.PathOf("config.json"), (16 << 20) + 1);
  EXPECT_THAT(OpenModelFolder(folder.path(), {}), Fails(kInvalid, "the limit is 16777216"));
}

}  // namespace
}  // namespace logprobd
