#include "server/weights/allowed_roots.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>

#include "server/weights/checkpoint.h"
#include "server/weights/head_weights.h"
#include "server/weights/regular_file.h"
#include "tests/support/model_folder.h"

namespace logprobd {
namespace {

namespace fs = std::filesystem;

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kDenied = absl::StatusCode::kPermissionDenied;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

int64_t NumOpenFiles() {
  const fs::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

/// A root with a model, next to a folder outside the root.
class AllowedRootsTest : public ::testing::Test {
 protected:
  AllowedRootsTest() {
    WriteModel("inside/model");
    WriteModel("outside/model");
    roots_ = std::make_shared<const AllowedRoots>(*AllowedRoots::Create({Path("inside")}));
  }

  std::string Path(const std::string& name) const { return folder_.PathOf(name); }

  void WriteModel(const std::string& name) const {
    folder_.WriteFile(name + "/config.json", R"({"hidden_size": 4, "vocab_size": 8})");
    folder_.WriteFile(name + "/model.safetensors",
                      testing::SafetensorsBytes({testing::MakeRandomTensor(
                          "lm_head.weight", Dtype::kBf16, {8, 4}, 1, 1)}));
  }

  absl::Status Open(const std::string& path) const {
    return OpenModelFolder(path, {.roots = roots_}).status();
  }

  testing::ModelFolder folder_;
  std::shared_ptr<const AllowedRoots> roots_;
};

TEST_F(AllowedRootsTest, OpensAModelBelowARoot) {
  EXPECT_TRUE(Open(Path("inside/model")).ok()) << Open(Path("inside/model"));
  EXPECT_TRUE(Open(Path("inside/model/")).ok());
  EXPECT_TRUE(Open(Path("inside/./model/model.safetensors")).ok());
}

TEST_F(AllowedRootsTest, OpensTheRootItself) {
  const auto roots = AllowedRoots::Create({Path("inside/model")});

  EXPECT_TRUE(roots->CheckPath(Path("inside/model")).ok());
}

TEST_F(AllowedRootsTest, OpensEverythingBelowTheRootOfTheFileSystem) {
  const auto roots = AllowedRoots::Create({"/"});

  EXPECT_TRUE(roots->CheckPath(Path("outside/model")).ok());
  EXPECT_TRUE(roots->CheckPath("/").ok());
}

TEST_F(AllowedRootsTest, RefusesAPathOutsideTheRootsWithoutCheckingThatItExists) {
  for (const std::string& path : {Path("outside/model"), Path("outside/absent"), Path("inside-too"),
                                  std::string("/"), std::string("/dev/zero"), folder_.path()}) {
    const absl::Status status = Open(path);
    EXPECT_EQ(status.code(), kDenied) << path;
    EXPECT_THAT(status.message(), HasSubstr("not below an allowed root"));
  }
}

TEST_F(AllowedRootsTest, RefusesDotDotEvenIfItStaysInside) {
  EXPECT_EQ(Open(Path("inside/../outside/model")).code(), kDenied);
  EXPECT_EQ(Open(Path("inside/model/../model")).code(), kDenied);
}

TEST_F(AllowedRootsTest, RefusesPathsThatAreNotAbsolute) {
  EXPECT_EQ(Open("").code(), kInvalid);
  EXPECT_EQ(Open("model").code(), kInvalid);
  EXPECT_EQ(Open(std::string("/a\0b", 4)).code(), kInvalid);
}

TEST_F(AllowedRootsTest, RefusesLinksThatLeadOut) {
  fs::create_directory_symlink(Path("outside/model"), Path("inside/link"));
  fs::create_directory_symlink("../outside/model", Path("inside/relative"));
  fs::create_directory_symlink("/proc/self/cwd", Path("inside/magic"));

  for (const char* name :
       {"inside/link", "inside/relative", "inside/magic", "inside/link/model.safetensors"}) {
    EXPECT_EQ(Open(Path(name)).code(), kDenied) << name;
  }
}

// As after a check of the path, when a link takes the place of its folder.
TEST_F(AllowedRootsTest, NamesNoFileOfAFolderThatALinkLeadsTo) {
  folder_.WriteFile("outside/other/secret.safetensors", "");
  fs::create_directory_symlink(Path("outside/other"), Path("inside/link"));

  const auto paths = FindModelPaths(Path("inside/link"), roots_.get());

  EXPECT_EQ(paths.status().code(), kDenied);
  EXPECT_THAT(paths.status().message(), Not(HasSubstr("secret")));
}

TEST_F(AllowedRootsTest, NamesTheFolderThatHasNoWeights) {
  const absl::Status status = Open(Path("inside"));

  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("'" + Path("inside") + "' has neither"));
}

TEST_F(AllowedRootsTest, LooksForNoAdapterOutsideTheRoots) {
  folder_.WriteFile("outside/adapter_config.json", "{}");
  fs::create_symlink(Path("outside/adapter_config.json"), Path("inside/model/adapter_config.json"));

  const auto warnings = [this](const ModelFolderOptions& options) {
    return OpenModelFolder(Path("inside/model"), options)->warnings;
  };
  EXPECT_THAT(warnings({.roots = roots_}), Not(Contains(HasSubstr("adapter_config.json"))));
  EXPECT_THAT(warnings({}), Contains(HasSubstr("adapter_config.json")));
}

TEST_F(AllowedRootsTest, RefusesAModelWhoseFilesAreOutsideTheRoots) {
  for (const char* file : {"config.json", "model.safetensors"}) {
    WriteModel("inside/cheat");
    fs::remove(Path(std::string("inside/cheat/") + file));
    fs::create_symlink(Path(std::string("outside/model/") + file),
                       Path(std::string("inside/cheat/") + file));

    const absl::Status status = Open(Path("inside/cheat"));
    EXPECT_EQ(status.code(), kDenied) << file;
    EXPECT_THAT(status.message(), HasSubstr("leads out of the allowed roots"));
    fs::remove_all(Path("inside/cheat"));
  }
}

TEST_F(AllowedRootsTest, FollowsLinksThatStayInside) {
  fs::create_directory_symlink("model", Path("inside/link"));
  fs::create_directory(Path("inside/snapshot"));
  fs::create_symlink("../model/config.json", Path("inside/snapshot/config.json"));
  fs::create_symlink(Path("inside/model/model.safetensors"),
                     Path("inside/snapshot/model.safetensors"));

  EXPECT_TRUE(Open(Path("inside/link")).ok());
  EXPECT_TRUE(Open(Path("inside/snapshot")).ok()) << Open(Path("inside/snapshot"));
}

TEST_F(AllowedRootsTest, FollowsLinksFromOneRootIntoAnother) {
  fs::create_directory_symlink(Path("outside/model"), Path("inside/link"));
  roots_ = std::make_shared<const AllowedRoots>(
      *AllowedRoots::Create({Path("inside"), Path("outside")}));

  EXPECT_TRUE(Open(Path("inside/link")).ok());
}

TEST_F(AllowedRootsTest, AcceptsARootThatIsALink) {
  fs::create_directory_symlink(Path("inside"), Path("models"));
  roots_ = std::make_shared<const AllowedRoots>(*AllowedRoots::Create({Path("models")}));

  EXPECT_TRUE(Open(Path("models/model")).ok()) << Open(Path("models/model"));
  EXPECT_TRUE(Open(Path("inside/model")).ok());
  EXPECT_EQ(Open(Path("outside/model")).code(), kDenied);
}

TEST_F(AllowedRootsTest, RefusesAFileThatIsNotRegularWithoutOpeningIt) {
  ASSERT_EQ(mkfifo(Path("inside/fifo.safetensors").c_str(), 0600), 0);
  WriteModel("inside/pipes");
  fs::remove(Path("inside/pipes/config.json"));
  ASSERT_EQ(mkfifo(Path("inside/pipes/config.json").c_str(), 0600), 0);
  WriteModel("inside/folders");
  fs::remove(Path("inside/folders/model.safetensors"));
  fs::create_directory(Path("inside/folders/model.safetensors"));

  EXPECT_EQ(Open(Path("inside/pipes")).code(), kInvalid);
  EXPECT_EQ(Open(Path("inside/folders")).code(), kInvalid);
  folder_.WriteFile("inside/config.json", R"({"hidden_size": 4, "vocab_size": 8})");
  EXPECT_EQ(Open(Path("inside/fifo.safetensors")).code(), kInvalid);
}

TEST_F(AllowedRootsTest, NamesAPathThatDoesNotExist) {
  EXPECT_EQ(Open(Path("inside/absent")).code(), absl::StatusCode::kNotFound);
}

TEST_F(AllowedRootsTest, LeavesNoFileOpenWhateverThePath) {
  fs::create_directory_symlink(Path("outside/model"), Path("inside/link"));
  const int64_t before = NumOpenFiles();

  EXPECT_TRUE(roots_->CheckPath(Path("inside/model")).ok());
  EXPECT_EQ(roots_->CheckPath(Path("inside/link")).code(), kDenied);
  EXPECT_EQ(roots_->CheckPath(Path("inside/absent")).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Open(Path("inside/model")).ok());
  EXPECT_EQ(Open(Path("inside/link")).code(), kDenied);

  EXPECT_EQ(NumOpenFiles(), before);
}

TEST_F(AllowedRootsTest, AcceptsOnlyExistingFolders) {
  EXPECT_EQ(AllowedRoots::Create({}).status().code(), kInvalid);
  EXPECT_EQ(AllowedRoots::Create({Path("absent")}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(AllowedRoots::Create({Path("inside/model/config.json")}).status().code(), kInvalid);
}

}  // namespace
}  // namespace logprobd
