#include "server/transport/sockets.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/few_files.h"
#include "tests/support/temp_folder.h"

namespace logprobd {
namespace {

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

TEST(CheckSocketPathTest, RefusesAPathThatIsNotASocket) {
  const testing::TempFolder folder;
  const std::string path = folder.Write("file", "precious");

  const absl::Status status = CheckSocketPath("--local", path);

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(CheckSocketPath("--local", path + ".absent").ok());
  EXPECT_EQ(CheckSocketPath("--local", std::string(200, 'a')).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(CheckSocketPathTest, APathHasFewerBytesThanAnAddressHolds) {
  constexpr size_t kBytes = sizeof(sockaddr_un::sun_path);
  EXPECT_TRUE(CheckSocketPath("--local", std::string(kBytes - 1, 'a')).ok());

  const absl::Status status = CheckSocketPath("--local", std::string(kBytes, 'a'));

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "--local: the path has 108 bytes, must have fewer than 108");
}

TEST(CheckSocketPathTest, FindsAServerWhateverTheTypeOfItsSocket) {
  const testing::TempFolder folder;
  const std::string path = folder.path("socket");
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    const auto listener = UnixListener::Open("--local", path, type);
    ASSERT_TRUE(listener.ok()) << listener.status();
    for (const int probed : {SOCK_STREAM, SOCK_SEQPACKET}) {
      const absl::Status status = CheckSocketPath("--local", path, probed);
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
      EXPECT_EQ(status.message(), absl::StrCat("--local: another server is listening on ", path));
    }
  }
}

TEST(CheckSocketPathTest, SaysThatItCannotLook) {
  const testing::TempFolder folder;
  const std::string path = folder.path("socket");
  const auto listener = UnixListener::Open("--local", path, SOCK_STREAM);
  ASSERT_TRUE(listener.ok()) << listener.status();
  absl::Status status;
  absl::Status lock;
  {
    const testing::FewFiles none(0);
    status = CheckSocketPath("--local", path);
    lock = SocketPathLock::Take("--local", path).status();
  }

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StartsWith(
      status.message(),
      absl::StrCat("--local: cannot find out whether a server listens on ", path, ": ")))
      << status;
  EXPECT_EQ(lock.message(),
            absl::StrCat("--local: cannot open ", path, ".lock: Too many open files"));
}

// Regression: a server waited forever for another server that hung.
TEST(CheckSocketPathTest, DoesNotWaitForAServerWhoseQueueIsFull) {
  const testing::TempFolder folder;
  const std::string path = folder.path("socket");
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
}

// Regression: two servers that started at a leftover socket removed each other's.
TEST(SocketPathLockTest, OneServerHasAPathUntilItEnds) {
  const testing::TempFolder folder;
  const std::string path = folder.path("socket");
  for (int round = 0; round < 2; ++round) {
    const auto first = SocketPathLock::Take("--local", path);
    ASSERT_TRUE(first.ok()) << first.status();

    const auto second = SocketPathLock::Take("--local", path);

    EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(second.status().message(),
              absl::StrCat("--local: another server is listening on ", path));
  }
  EXPECT_NE(access(absl::StrCat(path, ".lock").c_str(), F_OK), 0);
}

TEST(SocketPathLockTest, NamesTheFileThatItCannotCreate) {
  const auto lock = SocketPathLock::Take("--local", "/nowhere/socket");

  EXPECT_EQ(lock.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(lock.status().message(),
            "--local: cannot open /nowhere/socket.lock: No such file or directory");
}

TEST(UnixListenerTest, ReplacesALeftoverAndRemovesItsOwnFileOnly) {
  const testing::TempFolder folder;
  const std::string path = folder.path("socket");
  const sockaddr_un address = AddressOf(path);
  {
    const FileDescriptor leftover(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(bind(leftover.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
              0);
  }
  auto listener = UnixListener::Open("--local", path, SOCK_STREAM);
  ASSERT_TRUE(listener.ok()) << listener.status();
  struct stat info {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600U);
  EXPECT_EQ(UnixListener::Open("--local", path, SOCK_STREAM).status().code(),
            absl::StatusCode::kUnavailable);
  const FileDescriptor client(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  const std::optional<SocketPeer> peer = PeerOf(client.get());
  ASSERT_TRUE(peer.has_value());
  EXPECT_EQ(peer->user, geteuid());
  EXPECT_EQ(peer->process, getpid());
  EXPECT_TRUE(peer->IsOwnOrRoot());

  listener->reset();
  EXPECT_NE(access(path.c_str(), F_OK), 0);

  listener = UnixListener::Open("--local", path, SOCK_STREAM);
  ASSERT_TRUE(listener.ok());
  unlink(path.c_str());
  std::ofstream(path) << "another's";
  listener->reset();
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
}

TEST(UnixListenerTest, SaysWhyItCannotListen) {
  const testing::TempFolder folder;
  const std::string path = folder.path("socket");
  absl::Status status;
  {
    const testing::FewFiles none(0);
    status = UnixListener::Open("--local", path, SOCK_STREAM).status();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StartsWith(status.message(), "--local: cannot listen on " + path)) << status;

  const auto in_no_folder = UnixListener::Open("--local", "/nowhere/socket", SOCK_STREAM);
  EXPECT_EQ(in_no_folder.status().message(),
            "--local: cannot listen on /nowhere/socket: No such file or directory");
}

TEST(SocketPeerTest, IsUnknownForWhatIsNoUnixSocket) {
  const FileDescriptor file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(PeerOf(file.get()).has_value());
  EXPECT_FALSE(PeerOf(-1).has_value());
}

TEST(SocketPeerTest, TheServersUserAndRootAreNoOthers) {
  constexpr uid_t kNobody = 65'534;
  const auto is_own_or_root = [](uid_t user) {
    return SocketPeer{.user = user, .process = 1}.IsOwnOrRoot();
  };
  EXPECT_TRUE(is_own_or_root(geteuid()));
  EXPECT_TRUE(is_own_or_root(0));
  EXPECT_FALSE(is_own_or_root(geteuid() + 1));
  if (geteuid() != 0) {
    GTEST_SKIP() << "only root can become another user";
  }

  ASSERT_EQ(seteuid(kNobody), 0);
  const bool own = is_own_or_root(kNobody);
  const bool root = is_own_or_root(0);
  const bool other = is_own_or_root(1);
  ASSERT_EQ(seteuid(0), 0);

  EXPECT_TRUE(own);
  EXPECT_TRUE(root);
  EXPECT_FALSE(other);
}

}  // namespace
}  // namespace logprobd
