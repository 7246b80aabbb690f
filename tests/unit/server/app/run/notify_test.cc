#include "server/app/run/notify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/transport/sockets.h"
#include "tests/support/temp_folder.h"

namespace logprobd {
namespace {

using ::testing::HasSubstr;

/// Sets $NOTIFY_SOCKET until the end of the test.
class NotifyTest : public ::testing::Test {
 protected:
  ~NotifyTest() override { unsetenv("NOTIFY_SOCKET"); }

  static void SetSocket(const std::string& name) { setenv("NOTIFY_SOCKET", name.c_str(), 1); }

  /// Returns a datagram socket with the name `name`, in which '@' stands for a leading zero.
  static FileDescriptor Listen(const std::string& name) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name.data(), name.size());
    if (name[0] == '@') {
      address.sun_path[0] = '\0';
    }
    FileDescriptor fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                   static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size())),
              0);
    return fd;
  }

  /// Returns the next datagram, or "" if there is none.
  static std::string Receive(const FileDescriptor& fd) {
    char buffer[256];
    const ssize_t size = recv(fd.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
    return size < 0 ? "" : std::string(buffer, static_cast<size_t>(size));
  }

  static std::string ErrorOf(const std::string& message) {
    return std::string(NotifyServiceManager(message).message());
  }
};

TEST_F(NotifyTest, SendsEachMessageAsOneDatagramToThePathOrAbstractName) {
  const testing::TempFolder folder;
  const std::string path = folder.path("notify");
  const std::string abstract = absl::StrCat("@logprobd-notify-test-", getpid());
  for (const std::string& name : {path, abstract}) {
    const FileDescriptor manager = Listen(name);
    SetSocket(name);

    EXPECT_TRUE(NotifyServiceManager("READY=1\nSTATUS=ready").ok());
    EXPECT_TRUE(NotifyServiceManager("STOPPING=1").ok());

    EXPECT_EQ(Receive(manager), "READY=1\nSTATUS=ready") << name;
    EXPECT_EQ(Receive(manager), "STOPPING=1") << name;
    EXPECT_EQ(Receive(manager), "") << name;
  }
}

TEST_F(NotifyTest, DoesNothingWithoutAServiceManager) {
  unsetenv("NOTIFY_SOCKET");
  EXPECT_EQ(ErrorOf("READY=1"), "");
  SetSocket("");
  EXPECT_EQ(ErrorOf("READY=1"), "");
}

TEST_F(NotifyTest, DoesNotWaitForAManagerThatDoesNotRead) {
  const std::string name = absl::StrCat("@logprobd-notify-full-", getpid());
  const FileDescriptor manager = Listen(name);
  SetSocket(name);
  while (NotifyServiceManager("WATCHDOG=1").ok()) {
  }

  EXPECT_THAT(ErrorOf("READY=1"), HasSubstr("Resource temporarily unavailable"));

  EXPECT_EQ(Receive(manager), "WATCHDOG=1");
  EXPECT_TRUE(NotifyServiceManager("READY=1").ok());
}

/// Sets the variables of the service manager's watchdog until the end of the test.
class ServiceWatchdogTimeTest : public ::testing::Test {
 protected:
  ~ServiceWatchdogTimeTest() override { Set(nullptr, nullptr); }

  static void Set(const char* time, const char* pid) {
    (void)(time == nullptr ? unsetenv("WATCHDOG_USEC") : setenv("WATCHDOG_USEC", time, 1));
    (void)(pid == nullptr ? unsetenv("WATCHDOG_PID") : setenv("WATCHDOG_PID", pid, 1));
  }
};

TEST_F(ServiceWatchdogTimeTest, IsInMicroseconds) {
  Set("3000000", nullptr);
  EXPECT_EQ(ServiceWatchdogTime(), absl::Seconds(3));
  Set("3000000", absl::StrCat(getpid()).c_str());
  EXPECT_EQ(ServiceWatchdogTime(), absl::Seconds(3));
}

TEST_F(ServiceWatchdogTimeTest, IsInfiniteIfNothingOrAnotherProcessIsMeant) {
  Set(nullptr, nullptr);
  EXPECT_EQ(ServiceWatchdogTime(), absl::InfiniteDuration());
  for (const char* time : {"0", "-5", "soon", ""}) {
    Set(time, nullptr);
    EXPECT_EQ(ServiceWatchdogTime(), absl::InfiniteDuration()) << time;
  }
  Set("3000000", absl::StrCat(getpid() + 1).c_str());
  EXPECT_EQ(ServiceWatchdogTime(), absl::InfiniteDuration());
  Set("3000000", "nobody");
  EXPECT_EQ(ServiceWatchdogTime(), absl::InfiniteDuration());
}

TEST_F(NotifyTest, SaysWhyTheServiceManagerCannotBeReached) {
  SetSocket("/nowhere/notify");
  EXPECT_THAT(ErrorOf("READY=1"), HasSubstr("NOTIFY_SOCKET /nowhere/notify: No such file"));
  SetSocket("/");
  EXPECT_THAT(ErrorOf("READY=1"), HasSubstr("NOTIFY_SOCKET /: "));
  for (const std::string& name :
       {std::string("relative"), absl::StrCat("/", std::string(108, 'x'))}) {
    SetSocket(name);
    EXPECT_THAT(ErrorOf("READY=1"), HasSubstr("neither an absolute path nor an abstract name"));
  }
}

}  // namespace
}  // namespace logprobd
