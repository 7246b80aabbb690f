#include "server/transport/connection_acceptor.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <grp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/log.h"
#include "tests/support/cpu_seconds.h"
#include "tests/support/few_files.h"
#include "tests/support/temp_folder.h"

namespace {

/// A host name with two addresses, which no host has under a fixed name.
constexpr char kTwoAddresses[] = "two-addresses.test";
constexpr in_addr_t kFirstAddress = INADDR_LOOPBACK;
constexpr in_addr_t kSecondAddress = INADDR_LOOPBACK + 1;  // 127.0.0.2

}  // namespace

/// Resolves kTwoAddresses in place of the C library, which resolves all other names.
extern "C" int getaddrinfo(const char* name, const char* service, const addrinfo* hints,
                           addrinfo** found) {
  static const auto resolve =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if (name == nullptr || std::string(name) != kTwoAddresses) {
    return resolve(name, service, hints, found);
  }
  if (const int error = resolve("127.0.0.1", service, hints, found); error != 0) {
    return error;
  }
  return resolve("127.0.0.2", service, hints, &(*found)->ai_next);
}

namespace logprobd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ConnectionAcceptor::Options On(const std::string& host, int port = 0) {
  ConnectionAcceptor::Options options;
  options.address.host = host;
  options.address.port = port;
  options.address.is_loopback = true;
  return options;
}

/// The client's side of a connection.
class TestClient {
 public:
  TestClient(int family, int port, in_addr_t address4 = INADDR_LOOPBACK)
      : fd_(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (family == AF_INET6) {
      sockaddr_in6 address = {};
      address.sin6_family = AF_INET6;
      address.sin6_addr = in6addr_loopback;
      address.sin6_port = htons(static_cast<uint16_t>(port));
      is_connected_ =
          connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    } else {
      sockaddr_in address = {};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(address4);
      // Without bind, the kernel connects to all addresses of loopback from 127.0.0.1.
      (void)bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
      address.sin_port = htons(static_cast<uint16_t>(port));
      is_connected_ =
          connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    }
  }
  ~TestClient() { close(fd_); }
  TestClient(const TestClient&) = delete;
  TestClient& operator=(const TestClient&) = delete;

  bool is_connected() const { return is_connected_; }
  /// Makes the destructor reset the connection, so that no port stays in TIME_WAIT.
  void Reset() {
    const linger at_once = {.l_onoff = 1, .l_linger = 0};
    setsockopt(fd_, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  }
  /// Sends a byte and ends the client's direction of the connection.
  void SendAndShutDown() const {
    EXPECT_EQ(send(fd_, "x", 1, 0), 1);
    shutdown(fd_, SHUT_WR);
  }
  /// Waits until the server closes the connection or sends a byte, at most 30 s. Returns true if it
  /// was closed.
  bool SeesTheEnd() const {
    const timeval limit = {.tv_sec = 30, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    char byte = 0;
    const ssize_t received = recv(fd_, &byte, 1, 0);
    return received == 0 || (received < 0 && errno == ECONNRESET);
  }

 private:
  const int fd_;
  bool is_connected_ = false;
};

/// Keeps the sockets that the acceptor passes on.
class Taken {
 public:
  ~Taken() { CloseAll(); }
  ConnectionAcceptor::Handler Handler() {
    return [this](int socket) {
      const absl::MutexLock lock(&mutex_);
      sockets_.push_back(socket);
    };
  }
  /// Waits for `count` sockets. Fails the test if they do not arrive within 30 s.
  void WaitFor(size_t count) {
    const absl::MutexLock lock(&mutex_);
    count_ = count;
    EXPECT_TRUE(
        mutex_.AwaitWithTimeout(absl::Condition(this, &Taken::HasCount), absl::Seconds(30)));
  }
  std::vector<int> sockets() {
    const absl::MutexLock lock(&mutex_);
    return sockets_;
  }
  void CloseAll() {
    const absl::MutexLock lock(&mutex_);
    for (const int socket : sockets_) {
      close(socket);
    }
    sockets_.clear();
  }

 private:
  bool HasCount() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return sockets_.size() >= count_; }

  absl::Mutex mutex_;
  std::vector<int> sockets_ ABSL_GUARDED_BY(mutex_);
  size_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST(ConnectionAcceptorTest, PassesNonBlockingConnectionsToTheHandler) {
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(On("127.0.0.1"));
  ASSERT_TRUE(acceptor.ok()) << acceptor.status();
  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());

  const TestClient first(AF_INET, (*acceptor)->port());
  const TestClient second(AF_INET, (*acceptor)->port());
  taken.WaitFor(2);

  EXPECT_TRUE(first.is_connected() && second.is_connected());
  for (const int socket : taken.sockets()) {
    EXPECT_NE(fcntl(socket, F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(fcntl(socket, F_GETFD) & FD_CLOEXEC, 0);
  }
}

// Otherwise a short answer waits until the client has acknowledged the one before it.
TEST(ConnectionAcceptorTest, TheSocketsOfTcpSendWithoutDelay) {
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(On("127.0.0.1"));
  ASSERT_TRUE(acceptor.ok()) << acceptor.status();
  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());

  const TestClient client(AF_INET, (*acceptor)->port());
  taken.WaitFor(1);

  ASSERT_EQ(taken.sockets().size(), 1U);
  int on = 0;
  socklen_t size = sizeof(on);
  ASSERT_EQ(getsockopt(taken.sockets()[0], IPPROTO_TCP, TCP_NODELAY, &on, &size), 0);
  EXPECT_NE(on, 0);
}

TEST(ConnectionAcceptorTest, AcceptsConnectionsThatArrivedBeforeItsStart) {
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(On("127.0.0.1"));
  ASSERT_TRUE(acceptor.ok());
  const TestClient early(AF_INET, (*acceptor)->port());

  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());

  taken.WaitFor(1);
}

TEST(ConnectionAcceptorTest, ClosesConnectionsThatTheirClientClosedUnused) {
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(On("127.0.0.1"));
  ASSERT_TRUE(acceptor.ok());
  const int port = (*acceptor)->port();
  { const TestClient closed(AF_INET, port); }
  TestClient(AF_INET, port).Reset();
  const TestClient open(AF_INET, port);
  TestClient has_sent(AF_INET, port);
  has_sent.SendAndShutDown();

  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());

  taken.WaitFor(2);
  (*acceptor)->Stop();
  EXPECT_EQ(taken.sockets().size(), 2U);
}

TEST(ConnectionAcceptorTest, ListensOnEveryAddressOfAName) {
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(On("localhost"));
  ASSERT_TRUE(acceptor.ok());
  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());
  const TestClient four(AF_INET, (*acceptor)->port());
  const TestClient six(AF_INET6, (*acceptor)->port());

  taken.WaitFor((four.is_connected() ? 1U : 0U) + (six.is_connected() ? 1U : 0U));

  EXPECT_TRUE(four.is_connected() || six.is_connected());
}

TEST(ConnectionAcceptorTest, ReportsThatThePortIsInUse) {
  auto first = ConnectionAcceptor::Listen(On("127.0.0.1"));
  ASSERT_TRUE(first.ok());

  const auto second = ConnectionAcceptor::Listen(On("127.0.0.1", (*first)->port()));

  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("--listen: cannot listen on"));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("the port is in use"));
}

TEST(ConnectionAcceptorTest, ReportsWhyAnAddressCannotBeUsed) {
  // 192.0.2.0/24 is reserved for documentation, so no host has it.
  const auto acceptor = ConnectionAcceptor::Listen(On("192.0.2.1"));

  EXPECT_EQ(acceptor.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(acceptor.status().message()), HasSubstr("192.0.2.1:0"));
}

TEST(ConnectionAcceptorTest, RefusesConnectionsAfterStop) {
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(On("127.0.0.1"));
  ASSERT_TRUE(acceptor.ok());
  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());
  const int port = (*acceptor)->port();

  (*acceptor)->Stop();

  EXPECT_FALSE(TestClient(AF_INET, port).is_connected());
}

// Regression: the acceptor accepted connections as long as any arrived, and Stop waited.
TEST(ConnectionAcceptorTest, StopsWhileConnectionsArriveWithoutPause) {
  constexpr int kMost = 20'000;
  auto acceptor = ConnectionAcceptor::Listen(On("127.0.0.1"));
  ASSERT_TRUE(acceptor.ok());
  const int port = (*acceptor)->port();
  int taken = 0;
  absl::Notification flooded;
  std::unique_ptr<TestClient> next;
  const auto connect_again = [&] {
    next = std::make_unique<TestClient>(AF_INET, port);
    next->Reset();
  };
  const auto take = [&](int socket) {
    close(socket);
    if (++taken < kMost) {
      connect_again();  // the next one is already waiting
    }
    if (taken == 100) {
      flooded.Notify();
    }
  };
  connect_again();
  ASSERT_TRUE((*acceptor)->Start(take).ok());
  flooded.WaitForNotification();

  (*acceptor)->Stop();

  EXPECT_LT(taken, kMost);
}

// Regression: a connection that arrived when no file could be opened ended the listener for good.
TEST(ConnectionAcceptorTest, KeepsTheLastFilesAndContinuesWhenFilesAreFreeAgain) {
  Taken taken;
  ConnectionAcceptor::Options options = On("127.0.0.1");
  options.files_reserved = 8;
  auto acceptor = ConnectionAcceptor::Listen(options);
  ASSERT_TRUE(acceptor.ok());
  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());
  {
    const FewFiles few(12);
    const TestClient taken_client(AF_INET, (*acceptor)->port());
    taken.WaitFor(1);
    std::vector<std::unique_ptr<TestClient>> clients;
    for (int i = 0; i < 4; ++i) {
      clients.push_back(std::make_unique<TestClient>(AF_INET, (*acceptor)->port()));
    }

    EXPECT_TRUE(clients.back()->SeesTheEnd());
    EXPECT_LT(taken.sockets().size(), 5U);
  }
  taken.CloseAll();

  const TestClient later(AF_INET, (*acceptor)->port());

  taken.WaitFor(1);
}

// Here no more files can be opened before the acceptor sees the connection.
TEST(ConnectionAcceptorTest, AcceptsWaitingConnectionsWhenFilesAreFreeAgain) {
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(On("127.0.0.1"));
  ASSERT_TRUE(acceptor.ok());
  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());
  std::unique_ptr<TestClient> client;
  {
    const FewFiles none(1);  // only the client's socket
    client = std::make_unique<TestClient>(AF_INET, (*acceptor)->port());
    ASSERT_TRUE(client->is_connected());
  }

  taken.WaitFor(1);
}

// Regression: the idle connections of one peer took all files, and others found no room.
TEST(ConnectionAcceptorTest, ClosesTheConnectionsThatOneAddressHasTooMany) {
  Taken taken;
  ConnectionAcceptor::Options options = On(kTwoAddresses);
  options.peer_connections_max = 2;
  auto acceptor = ConnectionAcceptor::Listen(options);
  ASSERT_TRUE(acceptor.ok());
  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());
  const TestClient first(AF_INET, (*acceptor)->port(), kFirstAddress);
  const TestClient second(AF_INET, (*acceptor)->port(), kFirstAddress);
  taken.WaitFor(2);

  EXPECT_TRUE(TestClient(AF_INET, (*acceptor)->port(), kFirstAddress).SeesTheEnd());
  const TestClient other(AF_INET, (*acceptor)->port(), kSecondAddress);
  taken.WaitFor(3);

  taken.CloseAll();
  const TestClient later(AF_INET, (*acceptor)->port(), kFirstAddress);
  taken.WaitFor(1);
}

TEST(ConnectionAcceptorTest, LeavesHalfOfTheFilesToOtherAddresses) {
  constexpr size_t kReserved = 8;
  Taken taken;
  ConnectionAcceptor::Options options = On(kTwoAddresses);
  options.files_reserved = kReserved;
  auto acceptor = ConnectionAcceptor::Listen(options);
  ASSERT_TRUE(acceptor.ok());
  auto keep_and_answer = [keep = taken.Handler()](int socket) mutable {
    keep(socket);
    send(socket, "x", 1, MSG_NOSIGNAL);
  };
  ASSERT_TRUE((*acceptor)->Start(std::move(keep_and_answer)).ok());
  const int port = (*acceptor)->port();
  const FewFiles few(100);
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  const size_t half = (files.rlim_cur - kReserved) / 2;

  // The server keeps its sides of the connections open.
  size_t count = 0;
  while (count <= half && !TestClient(AF_INET, port, kFirstAddress).SeesTheEnd()) {
    ++count;
  }

  EXPECT_EQ(count, half);
  EXPECT_FALSE(TestClient(AF_INET, port, kSecondAddress).SeesTheEnd());
}

// The pause for want of files must not go on.
TEST(ConnectionAcceptorTest, AcceptsAtOnceAlsoAfterFilesWereShort) {
  constexpr size_t kClients = 200;  // with a pause of 50 ms before each they take 10 s
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(On("127.0.0.1"));
  ASSERT_TRUE(acceptor.ok());
  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());
  const auto expect_no_pauses = [&] {
    const absl::Time begin = absl::Now();
    for (size_t i = 0; i < kClients; ++i) {
      const TestClient client(AF_INET, (*acceptor)->port());
      taken.WaitFor(1);
      taken.CloseAll();
    }
    EXPECT_LT(absl::Now() - begin, absl::Seconds(8));
  };
  expect_no_pauses();
  std::unique_ptr<TestClient> client;
  {
    const FewFiles none(1);  // only the client's socket
    client = std::make_unique<TestClient>(AF_INET, (*acceptor)->port());
    poll(nullptr, 0, 100);
  }
  taken.WaitFor(1);
  taken.CloseAll();

  expect_no_pauses();
}

/// An acceptor on a Unix socket that sends every connection a byte.
class ConnectionAcceptorUnixTest : public ::testing::Test {
 protected:
  ConnectionAcceptorUnixTest() {
    ConnectionAcceptor::Options options;
    options.address.unix_path = path_;
    options.flag = "--admin";
    auto acceptor = ConnectionAcceptor::Listen(options);
    EXPECT_TRUE(acceptor.ok()) << acceptor.status();
    acceptor_ = *std::move(acceptor);
    const auto answer = [](int socket) {
      send(socket, "x", 1, MSG_NOSIGNAL);
      close(socket);
    };
    EXPECT_TRUE(acceptor_->Start(answer).ok());
  }

  /// Connects a client that stays.
  FileDescriptor Stay() const {
    FileDescriptor client(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
              0);
    return client;
  }

  /// What a client gets.
  enum Outcome : int { kServed, kClosed, kNoAccess, kNeither };

  /// Connects and returns the outcome within 30 s. Safe in a process that is forked of threads.
  Outcome Connect() const {
    const int client = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const timeval limit = {.tv_sec = 30, .tv_usec = 0};
    setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    if (connect(client, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      return errno == EACCES ? kNoAccess : kNeither;
    }
    char byte = 0;
    const ssize_t received = recv(client, &byte, 1, 0);
    const bool is_closed = received == 0 || (received < 0 && errno == ECONNRESET);
    close(client);
    return received == 1 ? kServed : is_closed ? kClosed : kNeither;
  }

  /// Returns the outcome of Connect in a process of another user, who has no groups of this one.
  Outcome ConnectAsAnotherUser() const {
    constexpr id_t kNobody = 65'534;
    const pid_t child = fork();
    if (child == 0) {
      const bool is_another = setgroups(0, nullptr) == 0 && setgid(kNobody) == 0 &&
                              setuid(kNobody) == 0 && geteuid() == kNobody;
      _exit(is_another ? Connect() : kNeither);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? static_cast<Outcome>(WEXITSTATUS(status)) : kNeither;
  }

  const TempFolder folder_;
  const std::string path_ = folder_.path("socket");
  std::unique_ptr<ConnectionAcceptor> acceptor_;
};

TEST_F(ConnectionAcceptorUnixTest, PassesConnectionsOfItsUserAndLeavesNoFile) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Connect(), kServed);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr(absl::StrCat("audit connection=--admin user=", geteuid(),
                                     " process=", getpid(), "\n")));

  acceptor_ = nullptr;
  EXPECT_NE(access(path_.c_str(), F_OK), 0);
}

// The mode of the file is the first defence, and the check of the process the second one.
TEST_F(ConnectionAcceptorUnixTest, RefusesAProcessOfAnotherUserWhateverTheMode) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "only root can run as another user";
  }
  ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
  EXPECT_EQ(ConnectAsAnotherUser(), kNoAccess);

  ASSERT_EQ(chmod(path_.c_str(), 0666), 0);
  SetLogLevel(LogLevel::kError);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(ConnectAsAnotherUser(), kClosed);
  const std::string lines = ::testing::internal::GetCapturedStderr();
  SetLogLevel(LogLevel::kInfo);
  EXPECT_THAT(lines, AllOf(HasSubstr("audit connection=--admin user=65534 process="),
                           HasSubstr("outcome=PERMISSION_DENIED lines_suppressed=0\n")));

  EXPECT_EQ(Connect(), kServed);
}

// Regression: the connections at a Unix socket could take all files.
TEST_F(ConnectionAcceptorUnixTest, ClosesTheConnectionsThatAreTooMany) {
  ConnectionAcceptor::Options options;
  options.flag = "--local";
  options.peer_connections_max = 2;
  options.is_audited = false;
  acceptor_ = nullptr;
  options.address.unix_path = path_;
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(options);
  ASSERT_TRUE(acceptor.ok()) << acceptor.status();
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());
  const FileDescriptor clients[] = {Stay(), Stay()};
  taken.WaitFor(2);

  EXPECT_EQ(Connect(), kClosed);

  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");  // no audit lines
}

TEST_F(ConnectionAcceptorUnixTest, LeavesThreeQuartersOfTheFilesToOthers) {
  constexpr size_t kReserved = 8;
  acceptor_ = nullptr;
  ConnectionAcceptor::Options options;
  options.address.unix_path = path_;
  options.files_reserved = kReserved;
  options.is_audited = false;
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(options);
  ASSERT_TRUE(acceptor.ok()) << acceptor.status();
  auto keep_and_answer = [keep = taken.Handler()](int socket) mutable {
    keep(socket);
    send(socket, "x", 1, MSG_NOSIGNAL);
  };
  ASSERT_TRUE((*acceptor)->Start(std::move(keep_and_answer)).ok());
  const FewFiles few(100);
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  const size_t quarter = (files.rlim_cur - kReserved) / 4;

  size_t count = 0;
  while (count <= quarter && Connect() == kServed) {
    ++count;
  }

  EXPECT_EQ(count, quarter);
}

TEST_F(ConnectionAcceptorUnixTest, UsesAPathThatItsCallerHasLocked) {
  acceptor_ = nullptr;
  const auto lock = SocketPathLock::Take("--local", path_);
  ASSERT_TRUE(lock.ok());
  ConnectionAcceptor::Options options;
  options.address.unix_path = path_;
  EXPECT_EQ(ConnectionAcceptor::Listen(options).status().code(), absl::StatusCode::kUnavailable);

  options.has_path_lock = true;

  EXPECT_TRUE(ConnectionAcceptor::Listen(options).ok());
}

TEST_F(ConnectionAcceptorUnixTest, LeavesItsPathToOthersAfterStop) {
  ConnectionAcceptor::Options options;
  options.address.unix_path = path_;

  acceptor_->Stop();

  const auto next = ConnectionAcceptor::Listen(options);
  EXPECT_TRUE(next.ok()) << next.status();
}

TEST(ConnectionAcceptorTest, SpendsNoTimeWhileAConnectionWaitsForAFile) {
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(On(kTwoAddresses));
  ASSERT_TRUE(acceptor.ok());
  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());
  for (const in_addr_t address : {kFirstAddress, kSecondAddress}) {
    std::unique_ptr<TestClient> client;
    {
      const FewFiles none(1);  // only the client's socket
      client = std::make_unique<TestClient>(AF_INET, (*acceptor)->port(), address);
      ASSERT_TRUE(client->is_connected());

      EXPECT_LT(CpuSecondsWithin(kIdlePeriod), kIdleCpuSecondsMax);
      EXPECT_EQ(taken.sockets().size(), 0U);
    }
    taken.WaitFor(1);
    taken.CloseAll();
  }
}

TEST(ConnectionAcceptorTest, TakesConnectionsOfAllListenersAndThenSleeps) {
  Taken taken;
  auto acceptor = ConnectionAcceptor::Listen(On(kTwoAddresses));
  ASSERT_TRUE(acceptor.ok());
  ASSERT_TRUE((*acceptor)->Start(taken.Handler()).ok());

  const TestClient first(AF_INET, (*acceptor)->port(), kFirstAddress);
  const TestClient second(AF_INET, (*acceptor)->port(), kSecondAddress);
  taken.WaitFor(2);

  EXPECT_LT(CpuSecondsWithin(kIdlePeriod), kIdleCpuSecondsMax);
}

}  // namespace
}  // namespace logprobd::testing
