#include "server/transport/sockets.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace logprobd {
namespace {

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

TEST(CheckSocketPathTest, RefusesAPathThatIsNotASocket) {
  const std::string path = ::testing::TempDir() + "/sockets_test.file";
  std::ofstream(path) << "precious";

  const absl::Status status = CheckSocketPath("--local", path);

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(CheckSocketPath("--local", path + ".absent").ok());
  EXPECT_EQ(CheckSocketPath("--local", std::string(200, 'a')).code(),
            absl::StatusCode::kInvalidArgument);
}

// Regression: a server waited forever for another server that hung.
TEST(CheckSocketPathTest, DoesNotWaitForAServerWhoseQueueIsFull) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/sockets_test_", getpid());
  const sockaddr_un address = AddressOf(path);
  const auto* const name = reinterpret_cast<const sockaddr*>(&address);
  const FileDescriptor server(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(server.get(), name, sizeof(address)), 0);
  ASSERT_EQ(listen(server.get(), 0), 0);
  std::vector<FileDescriptor> queue;
  do {
    queue.emplace_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  } while (connect(queue.back().get(), name, sizeof(address)) == 0);

  const absl::Status status = CheckSocketPath("--local", path);

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), absl::StrCat("--local: another server is listening on ", path));
  unlink(path.c_str());
}

}  // namespace
}  // namespace logprobd
