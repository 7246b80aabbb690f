#include "client/cpp/local_lease.h"

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_control_socket.h"
#include "tests/support/temp_folder.h"

namespace {

/// Set if this thread's next recvmsg shall end as after the time limit of its socket.
thread_local bool next_receive_is_late = false;

}  // namespace

extern "C" ssize_t recvmsg(int socket, msghdr* message, int flags) {
  static const auto receive = reinterpret_cast<decltype(&recvmsg)>(dlsym(RTLD_NEXT, "recvmsg"));
  if (std::exchange(next_receive_is_late, false)) {
    errno = EAGAIN;
    return -1;
  }
  return receive(socket, message, flags);
}

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

LocalAccess AccessTo(const testing::FakeControlSocket& control) {
  const v1::LocalAccess access = control.access();
  return {.boot_id = access.boot_id(), .control_path = access.control_path()};
}

class LocalLeaseTest : public ::testing::Test {
 protected:
  std::shared_ptr<LocalLease> Connect() {
    absl::StatusOr<std::shared_ptr<LocalLease>> lease =
        LocalLease::Connect(AccessTo(control_), "trainer");
    EXPECT_TRUE(lease.ok()) << lease.status();
    return *lease;
  }

  testing::FakeControlSocket control_{{.region_bytes_max = 1 << 20, .lease_regions_max = 7}};
};

TEST_F(LocalLeaseTest, LearnsTheServersGrant) {
  const std::shared_ptr<LocalLease> lease = Connect();

  EXPECT_TRUE(lease->grant().shared_memory);
  EXPECT_FALSE(lease->grant().cuda_ipc);
  EXPECT_EQ(lease->grant().region_bytes_max, 1 << 20);
  EXPECT_EQ(lease->grant().lease_bytes_max, 1 << 30);
  EXPECT_EQ(lease->grant().regions_max, 7);
  EXPECT_EQ(lease->grant().lease, "lease-1");
  EXPECT_TRUE(lease->IsAlive());
  EXPECT_THAT(control_.clients(), ElementsAre("trainer"));
}

TEST_F(LocalLeaseTest, MapsARegionThatBothSidesSee) {
  const std::shared_ptr<LocalLease> lease = Connect();
  const auto region = lease->CreateRegion(5'000);
  ASSERT_TRUE(region.ok()) << region.status();

  std::memcpy((*region)->bytes().data() + 64, "hello", 5);

  EXPECT_THAT((*region)->bytes(), SizeIs(8192));
  v1::ScoreRequest request;
  request.mutable_shared_memory()->set_region((*region)->id());
  request.mutable_shared_memory()->set_offset(64);
  request.mutable_shared_memory()->set_bytes(5);
  ASSERT_TRUE(control_.Fill(&request).ok());
  EXPECT_EQ(request.hidden(), "hello");
}

TEST_F(LocalLeaseTest, ClosesARegionAndLives) {
  const std::shared_ptr<LocalLease> lease = Connect();
  const auto region = lease->CreateRegion(1);
  ASSERT_TRUE(region.ok()) << region.status();

  EXPECT_TRUE(lease->CloseRegion((*region)->id()).ok());

  EXPECT_EQ(control_.num_regions(), 0);
  EXPECT_TRUE(lease->IsAlive());
  EXPECT_EQ(lease->CloseRegion((*region)->id()).code(), absl::StatusCode::kNotFound);
}

TEST_F(LocalLeaseTest, SaysWhatTheServerRefused) {
  const std::shared_ptr<LocalLease> lease = Connect();

  const absl::Status status = lease->CreateRegion(2 << 20).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "above the limits");
  EXPECT_TRUE(lease->IsAlive());
}

TEST_F(LocalLeaseTest, ALateReplyIsNotTakenForThatOfTheNextRequest) {
  const std::shared_ptr<LocalLease> lease = Connect();
  next_receive_is_late = true;
  EXPECT_EQ(lease->CreateRegion(1).status().code(), absl::StatusCode::kUnavailable);

  EXPECT_EQ(lease->CloseRegion("another").code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(lease->IsAlive());
}

TEST_F(LocalLeaseTest, SeesTheEndOfTheServer) {
  const std::shared_ptr<LocalLease> lease = Connect();

  control_.DropLeases();

  EXPECT_FALSE(lease->IsAlive());
  EXPECT_EQ(lease->CreateRegion(1).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(LocalLeaseTest, ReturnsItsRegionsWithItsLastReference) {
  ASSERT_TRUE(Connect()->CreateRegion(1).ok());

  control_.WaitForNoLease();

  EXPECT_EQ(control_.num_regions(), 0);
}

TEST_F(LocalLeaseTest, IsNotAliveOnceItIsClosed) {
  const std::shared_ptr<LocalLease> lease = Connect();

  lease->Close();

  EXPECT_FALSE(lease->IsAlive());
  EXPECT_FALSE(lease->CreateRegion(1).ok());
}

TEST_F(LocalLeaseTest, SaysWhyTheServerCannotBeReached) {
  const auto message = [](const LocalAccess& access) {
    return std::string(LocalLease::Connect(access, "").status().message());
  };
  LocalAccess access = AccessTo(control_);

  access.control_path = "/nowhere/control.sock";
  EXPECT_THAT(message(access), HasSubstr("mount the folder of the server's socket"));
  access.control_path = "";
  EXPECT_THAT(message(access), HasSubstr("no control socket"));
  access.control_path = std::string(200, 'x');
  EXPECT_THAT(message(access), HasSubstr("no control socket"));
  access.boot_id = "other";
  EXPECT_THAT(message(access), HasSubstr("another host"));
  access.boot_id = "";
  EXPECT_THAT(message(access), HasSubstr("another host"));
}

TEST_F(LocalLeaseTest, SaysThatNobodyListensAnyMore) {
  LocalAccess access = AccessTo(control_);
  const testing::TempFolder folder;
  access.control_path = folder.path("dead.sock");
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, access.control_path.data(), access.control_path.size());
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
  ASSERT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  close(fd);

  const absl::Status status = LocalLease::Connect(access, "").status();

  EXPECT_THAT(std::string(status.message()), HasSubstr("the server has ended"));
}

/// Returns how many of the process's descriptors belong to files of this name.
int CountDescriptors(const std::string& name) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    count += target.find(name) == std::string::npos ? 0 : 1;
  }
  return count;
}

TEST(LocalLeaseAnswerTest, ClosesTheDescriptorOfARefusal) {
  const testing::FakeControlSocket control({.refuses_with_descriptor = true});
  absl::StatusOr<std::shared_ptr<LocalLease>> lease = LocalLease::Connect(AccessTo(control), "");
  ASSERT_TRUE(lease.ok()) << lease.status();

  EXPECT_EQ((*lease)->CreateRegion(1).status().code(), absl::StatusCode::kResourceExhausted);

  lease->reset();
  control.WaitForNoLease();  // The fake has closed its own descriptor.
  EXPECT_EQ(CountDescriptors("logprobd-refused"), 0);
}

TEST(LocalLeaseAnswerTest, RefusesMalformedAnswers) {
  for (const std::string& nonsense : {std::string("\xff\xff"), std::string("\x12\x01x")}) {
    const testing::FakeControlSocket control({.nonsense = nonsense});

    EXPECT_EQ(LocalLease::Connect(AccessTo(control), "").status().code(),
              absl::StatusCode::kUnavailable);
  }
}

}  // namespace
}  // namespace logprobd::client
