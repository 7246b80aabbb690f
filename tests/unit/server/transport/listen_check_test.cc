#include "server/transport/listen_check.h"

#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace logprobd {
namespace {

TEST(ListenCheckTest, LeavesFilesAloneThatAreNoSocket) {
  const std::string path = ::testing::TempDir() + "/listen_check_test.file";
  std::ofstream(path) << "precious";

  const absl::Status status = CheckSocketPath("--local", path);

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(CheckSocketPath("--local", path + ".absent").ok());
  EXPECT_EQ(CheckSocketPath("--local", std::string(200, 'a')).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace logprobd
