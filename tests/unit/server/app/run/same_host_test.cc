#include "server/app/run/same_host.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "server/app/options/part_options.h"
#include "tests/support/temp_folder.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(SameHostTest, PinsNothingAndHasNoDeviceMemoryOnACpu) {
  Metrics metrics({});
  ServerOptions options;

  const auto memory = CreateSameHostMemory(options, ServerPlan(), metrics);

  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_FALSE(memory->pinning->pins());
  EXPECT_EQ(memory->devices, nullptr);
  options.cuda_ipc = true;
  const absl::Status refusal = CreateSameHostMemory(options, ServerPlan(), metrics).status();
  EXPECT_EQ(refusal.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refusal.message()), HasSubstr("--cuda-ipc"));
}

TEST(SameHostTest, LimitsALeaseToTheClientShare) {
  ServerOptions options;
  options.local = "/run/logprobd.sock";
  options.shared_memory_bytes = 1'000'000;
  options.region_bytes = 5'000;
  options.client_share = 0.25;
  const SameHostMemory memory;
  GrpcServer::Options grpc;

  SetSameHostOptions(options, memory, grpc);

  EXPECT_EQ(grpc.unix_socket, "/run/logprobd.sock");
  EXPECT_FALSE(grpc.unix_socket_is_optional);
  EXPECT_EQ(grpc.shared_memory.bytes_max, 1'000'000);
  EXPECT_EQ(grpc.shared_memory.lease_bytes_max, 250'000);
  EXPECT_EQ(grpc.shared_memory.region_bytes_max, 5'000);
  EXPECT_EQ(grpc.pinning, memory.pinning.get());
  EXPECT_EQ(SharedMemoryBytesMax(options), 1'000'000);
}

TEST(SameHostTest, FindsAFolderForTheSockets) {
  ServerOptions options;
  options.listen = "127.0.0.1:8499";
  GrpcServer::Options grpc;

  SetSameHostOptions(options, SameHostMemory(), grpc);

  EXPECT_THAT(grpc.unix_socket, EndsWith("/logprobd-8499.sock"));
  EXPECT_TRUE(grpc.unix_socket_is_optional);
}

TEST(SameHostTest, PlansNoSharedMemoryWithoutASocket) {
  ServerOptions options;
  options.local = "";

  EXPECT_EQ(SharedMemoryBytesMax(options), 0);
}

class AutoSocketPathTest : public ::testing::Test {
 protected:
  /// Creates a folder with that mode and returns its path.
  std::string Folder(mode_t mode) {
    std::string folder = parent_.path(absl::StrCat(++num_folders_));
    EXPECT_EQ(mkdir(folder.c_str(), S_IRWXU), 0);
    EXPECT_EQ(chmod(folder.c_str(), mode), 0);
    return folder;
  }

 private:
  const testing::TempFolder parent_;
  int num_folders_ = 0;
};

TEST_F(AutoSocketPathTest, IsNamedAfterThePortInTheFirstPrivateFolder) {
  const std::string open = Folder(0755);
  const std::string ours = Folder(0700);

  EXPECT_EQ(AutoSocketPath(8470, {"/no/such/folder", open, ours}).value(),
            ours + "/logprobd-8470.sock");
}

TEST_F(AutoSocketPathTest, IsRandomIfThePortIsNotKnown) {
  const std::string folder = Folder(0700);

  const std::string first = AutoSocketPath(0, {folder}).value();

  EXPECT_THAT(first, AllOf(StartsWith(folder + "/logprobd-"), EndsWith(".sock")));
  EXPECT_NE(AutoSocketPath(0, {folder}).value(), first);
}

TEST_F(AutoSocketPathTest, SaysWhatIsWrongWithEachFolder) {
  const std::string open = Folder(0755);
  const std::string ours = Folder(0700);
  const std::string link = ours + "/link";
  ASSERT_EQ(symlink(ours.c_str(), link.c_str()), 0);

  const auto none = AutoSocketPath(8470, {"relative", "/no/such/folder", open, link});

  EXPECT_EQ(none.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(none.status().message()),
              AllOf(HasSubstr("relative: it is not an absolute path"),
                    HasSubstr("/no/such/folder: No such file"),
                    HasSubstr(open + ": other users have access"),
                    HasSubstr(link + ": it is not a folder of this user")));
  unlink(link.c_str());
}

TEST_F(AutoSocketPathTest, CreatesAPrivateFolderInTmp) {
  const std::string last = SameHostFolders().back();

  EXPECT_EQ(last, "/tmp/logprobd-" + std::to_string(geteuid()));
  EXPECT_THAT(AutoSocketPath(8470, {last}).value(), StartsWith(last));
  struct stat info = {};
  ASSERT_EQ(lstat(last.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700U);
}

TEST(AdminAddressTest, AutoTakesASocketNextToTheOthersAndOthersStayAsTheyAre) {
  ServerOptions options;
  options.listen = "127.0.0.1:8499";
  EXPECT_EQ(*AdminAddress(options), "");
  options.admin = "unix:/run/admin.sock";
  EXPECT_EQ(*AdminAddress(options), "unix:/run/admin.sock");
  options.admin = kAutoPath;
  EXPECT_THAT(*AdminAddress(options),
              AllOf(StartsWith("unix:/"), EndsWith("/logprobd-8499.sock.admin")));
}

}  // namespace
}  // namespace logprobd
