#include "server/app/local_path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class LocalPathTest : public ::testing::Test {
 protected:
  /// A new folder of that mode.
  std::string Folder(mode_t mode) {
    std::string folder = ::testing::TempDir() + "/local_path_XXXXXX";
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    EXPECT_EQ(chmod(folder.c_str(), mode), 0);
    return folder;
  }
};

TEST_F(LocalPathTest, IsNamedAfterThePortInTheFirstFolderThatIsOurs) {
  const std::string open = Folder(0755);
  const std::string ours = Folder(0700);

  EXPECT_EQ(AutoLocalPath(8470, {"/no/such/folder", open, ours}).value(),
            ours + "/logprobd-8470.sock");
}

TEST_F(LocalPathTest, HasANameByChanceForAPortThatIsNotKnown) {
  const std::string folder = Folder(0700);

  const std::string first = AutoLocalPath(0, {folder}).value();

  EXPECT_THAT(first, AllOf(StartsWith(folder + "/logprobd-"), EndsWith(".sock")));
  EXPECT_NE(AutoLocalPath(0, {folder}).value(), first);
}

TEST_F(LocalPathTest, SaysWhatIsWrongWithEachFolder) {
  const std::string open = Folder(0755);
  const std::string ours = Folder(0700);
  const std::string link = ours + "/link";
  ASSERT_EQ(symlink(ours.c_str(), link.c_str()), 0);

  const auto none = AutoLocalPath(8470, {"relative", "/no/such/folder", open, link});

  EXPECT_EQ(none.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(
      std::string(none.status().message()),
      AllOf(HasSubstr("relative: no absolute path"), HasSubstr("/no/such/folder: No such file"),
            HasSubstr(open + ": others may"), HasSubstr(link + ": no folder of this user")));
  unlink(link.c_str());
}

TEST_F(LocalPathTest, MakesAFolderOfItsOwnInTmp) {
  const std::string last = LocalFolders().back();

  EXPECT_EQ(last, "/tmp/logprobd-" + std::to_string(geteuid()));
  EXPECT_THAT(AutoLocalPath(8470, {last}).value(), StartsWith(last));
  struct stat facts = {};
  ASSERT_EQ(lstat(last.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700U);
}

}  // namespace
}  // namespace logprobd
