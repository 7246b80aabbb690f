#include "server/transport/control_socket.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/log.h"
#include "tests/support/control_client.h"
#include "tests/support/cpu_seconds.h"
#include "tests/support/fake_client_memory.h"
#include "tests/support/few_files.h"
#include "tests/support/temp_folder.h"

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPage = 4'096;

int32_t Code(absl::StatusCode code) { return static_cast<int32_t>(code); }

class ControlSocketTest : public ::testing::Test {
 protected:
  ControlSocketTest() {
    SharedRegions::Options options{.bytes_max = 16 * kPage,
                                   .region_bytes_max = 8 * kPage,
                                   .lease_bytes_max = 8 * kPage,
                                   .lease_regions_max = 2};
    regions_ = *SharedRegions::Create(options, pinning_, metrics_);
  }

  void Make(ControlSocket::Options options = {}) {
    options.path = path_;
    socket_ = nullptr;
    auto socket = ControlSocket::Create(options, *regions_);
    ASSERT_TRUE(socket.ok()) << socket.status();
    socket_ = *std::move(socket);
  }
  void SetUp() override { Make(); }

  /// Expects that a new client is served.
  void ExpectServing() {
    ControlClient client(path_);
    EXPECT_EQ(client.Hello().status_code(), 0);
    const ControlReply region = client.CreateRegion(kPage);
    EXPECT_EQ(region.message.status_code(), 0) << region.message.status_message();
    EXPECT_TRUE(region.file.is_open());
  }

  const TempFolder folder_;
  const std::string path_ = folder_.path("control");
  FakePinning pinning_;
  Metrics metrics_{Metrics::Options{}};
  std::unique_ptr<SharedRegions> regions_;
  std::unique_ptr<ControlSocket> socket_;
};

TEST_F(ControlSocketTest, LetsAClientCreateAndCloseARegion) {
  ControlClient client(path_);
  const v1::LocalReply hello = client.Hello();
  EXPECT_EQ(hello.status_code(), 0);
  EXPECT_EQ(hello.welcome().lease().size(), 16U);
  EXPECT_TRUE(hello.welcome().shared_memory());
  EXPECT_FALSE(hello.welcome().cuda_ipc());
  EXPECT_EQ(hello.welcome().region_bytes_max(), 8 * kPage);
  EXPECT_EQ(hello.welcome().lease_bytes_max(), 8 * kPage);
  EXPECT_EQ(hello.welcome().lease_regions_max(), 2U);

  const ControlReply created = client.CreateRegion(kPage + 1);

  ASSERT_EQ(created.message.status_code(), 0) << created.message.status_message();
  EXPECT_EQ(created.message.region().bytes(), 2 * kPage);
  MappedRegion mapped(created);
  mapped.bytes()[64] = std::byte{9};
  RandomId id;
  std::copy(mapped.id().begin(), mapped.id().end(), id.begin());
  {
    const auto payload = regions_->Find({.region = id, .offset = 64, .bytes = 1});
    ASSERT_TRUE(payload.ok()) << payload.status();
    EXPECT_EQ(payload->pieces[0][0], std::byte{9});
  }
  EXPECT_EQ(client.CloseRegion(mapped.id()).status_code(), 0);
  EXPECT_EQ(client.CloseRegion(mapped.id()).status_code(), Code(absl::StatusCode::kNotFound));
  pinning_.WaitForPinned(0);
}

TEST_F(ControlSocketTest, WelcomesAClientWithWhatItMayUse) {
  Make({.cuda_ipc = true});
  EXPECT_TRUE(ControlClient(path_).Hello().welcome().cuda_ipc());
  EXPECT_TRUE(ControlClient(path_).Hello().welcome().shared_memory());

  socket_ = nullptr;
  regions_ = *SharedRegions::Create({.bytes_max = 0}, pinning_, metrics_);
  Make();

  EXPECT_FALSE(ControlClient(path_).Hello().welcome().cuda_ipc());
  EXPECT_FALSE(ControlClient(path_).Hello().welcome().shared_memory());
}

TEST_F(ControlSocketTest, IsOpenToItsOwnUserOnly) {
  struct stat file = {};
  ASSERT_EQ(lstat(path_.c_str(), &file), 0);

  EXPECT_TRUE(S_ISSOCK(file.st_mode));
  EXPECT_EQ(file.st_mode & 0777, 0600U);
}

TEST_F(ControlSocketTest, RefusesAProcessOfAnotherUser) {
  Make({.is_allowed = [](uid_t user) { return user != geteuid(); }});
  SetLogLevel(LogLevel::kError);
  ::testing::internal::CaptureStderr();
  // More than the 20 of which the log has lines.
  for (int i = 0; i < 30; ++i) {
    ControlClient client(path_);

    const auto reply = client.Receive();

    ASSERT_TRUE(reply.has_value());
    EXPECT_EQ(reply->message.status_code(), Code(absl::StatusCode::kPermissionDenied));
    EXPECT_TRUE(client.IsClosed());
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  SetLogLevel(LogLevel::kInfo);
  const std::string line = absl::StrCat("audit connection=--local user=", geteuid(),
                                        " process=", getpid(), " outcome=PERMISSION_DENIED");
  EXPECT_EQ(std::vector<std::string>(absl::StrSplit(log, line)).size(), 21U) << log;
}

TEST_F(ControlSocketTest, TakesAllRegionsBackWhenTheClientLeaves) {
  auto client = std::make_unique<ControlClient>(path_);
  client->Hello();
  EXPECT_EQ(client->CreateRegion(4 * kPage).message.status_code(), 0);
  EXPECT_EQ(client->CreateRegion(4 * kPage).message.status_code(), 0);
  EXPECT_EQ(pinning_.pinned_bytes(), 8 * kPage);

  client = nullptr;

  pinning_.WaitForPinned(0);
  ExpectServing();
}

TEST_F(ControlSocketTest, TakesBackARegionWhoseClientLeftDuringItsCreation) {
  pinning_.Hold();
  ControlClient client(path_);
  client.Hello();
  v1::LocalRequest request;
  request.mutable_create_region()->set_bytes(4 * kPage);
  client.Send(request);
  client.Close();
  ControlClient second(path_);
  EXPECT_EQ(second.Hello().status_code(), 0);  // the server has seen that the first client left

  pinning_.Release();

  const ControlReply region = second.CreateRegion(kPage);
  EXPECT_EQ(region.message.status_code(), 0);
  pinning_.WaitForPinned(kPage);
}

TEST_F(ControlSocketTest, AnswersRequestsThatCameTogetherInTheirOrder) {
  ControlClient client(path_);
  v1::LocalRequest hello;
  hello.mutable_hello();
  v1::LocalRequest create;
  create.mutable_create_region()->set_bytes(kPage);
  v1::LocalRequest close;
  close.mutable_close_region()->set_id(std::string(16, 'x'));
  client.Send(hello);
  client.Send(create);
  client.Send(close);

  EXPECT_TRUE(client.Receive()->message.has_welcome());
  EXPECT_TRUE(client.Receive()->message.has_region());
  EXPECT_EQ(client.Receive()->message.status_code(), Code(absl::StatusCode::kNotFound));
}

TEST_F(ControlSocketTest, ClosesAConnectionThatDoesNotSendHello) {
  Make({.hello_time_max = absl::Milliseconds(1)});
  ControlClient silent(path_);

  EXPECT_TRUE(silent.IsClosed());
}

TEST_F(ControlSocketTest, AllowsAtMostItsNumberOfConnections) {
  Make({.connections_max = 2});
  ControlClient first(path_);
  ControlClient second(path_);
  EXPECT_EQ(first.Hello().status_code(), 0);
  EXPECT_EQ(second.Hello().status_code(), 0);
  ControlClient third(path_);

  const auto refusal = third.Receive();

  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->message.status_code(), Code(absl::StatusCode::kResourceExhausted));
  EXPECT_TRUE(third.IsClosed());
  first.CreateRegion(kPage);
  first.Close();
  pinning_.WaitForPinned(0);  // now a new client can connect
  ExpectServing();
}

TEST_F(ControlSocketTest, AcceptsAClientThatArrivedWhenNoFileWasLeft) {
  ControlClient first(path_);
  first.Hello();
  std::unique_ptr<ControlClient> second;
  {
    const FewFiles none(1);  // only the client's socket
    second = std::make_unique<ControlClient>(path_);
    for (int i = 0; i < 2; ++i) {  // afterwards the server has seen the second client
      EXPECT_EQ(first.CloseRegion(std::string(16, 'x')).status_code(),
                Code(absl::StatusCode::kNotFound));
    }
  }

  EXPECT_EQ(second->Hello().status_code(), 0);
}

TEST_F(ControlSocketTest, SpendsNoTimeWhileItsClientsDoNothing) {
  EXPECT_LT(CpuSecondsWithin(kIdlePeriod), kIdleCpuSecondsMax);

  ControlClient silent(path_);  // has 10 s for its Hello
  ControlClient client(path_);
  client.Hello();
  EXPECT_EQ(client.CreateRegion(kPage).message.status_code(), 0);

  EXPECT_LT(CpuSecondsWithin(kIdlePeriod), kIdleCpuSecondsMax);
}

TEST_F(ControlSocketTest, SpendsNoTimeWhileAClientWaitsForAFile) {
  std::unique_ptr<ControlClient> client;
  {
    const FewFiles none(1);  // only the client's socket
    client = std::make_unique<ControlClient>(path_);

    EXPECT_LT(CpuSecondsWithin(kIdlePeriod), kIdleCpuSecondsMax);
  }

  EXPECT_EQ(client->Hello().status_code(), 0);
}

TEST_F(ControlSocketTest, SaysThatItHasNoFileForItself) {
  socket_ = nullptr;
  const int num_open = CountOpenFiles();
  for (const auto& [left, code] : {std::pair{0, absl::StatusCode::kResourceExhausted},
                                   std::pair{1, absl::StatusCode::kUnavailable}}) {
    const FewFiles few(left);  // an eventfd and a listener
    const absl::Status status = ControlSocket::Create({.path = path_}, *regions_).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--local: "));
  }
  EXPECT_EQ(CountOpenFiles(), num_open);
}

TEST_F(ControlSocketTest, ALeaseTakesNoneOfTheReservedFiles) {
  constexpr int kLeft = 30;
  socket_ = nullptr;
  // The files of the first client and of its lease are the last that leases may take but one.
  socket_ = *ControlSocket::Create({.path = path_, .files_reserved = kLeft - 3}, *regions_);
  const FewFiles few(kLeft);
  ControlClient first(path_);
  ASSERT_EQ(first.Hello().status_code(), 0);

  ControlClient second(path_);

  const auto refusal = second.Receive();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->message.status_code(), Code(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(refusal->message.status_message(), "few files are left: try again later");
  EXPECT_TRUE(second.IsClosed());
}

// Regression: leases took the files that other listeners needed.
TEST_F(ControlSocketTest, LeavesFilesToOthers) {
  constexpr int kReserved = 8;
  socket_ = nullptr;
  socket_ = *ControlSocket::Create({.path = path_, .files_reserved = kReserved}, *regions_);
  const FewFiles few(60);
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  const size_t quarter = (files.rlim_cur - kReserved) / 4;
  std::vector<std::unique_ptr<ControlClient>> leases;
  for (size_t i = 0; i < quarter; ++i) {
    leases.push_back(std::make_unique<ControlClient>(path_));
    ASSERT_EQ(leases.back()->Hello().status_code(), 0) << i << " of " << quarter;
  }

  ControlClient refused(path_);

  const auto refusal = refused.Receive();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->message.status_code(), Code(absl::StatusCode::kResourceExhausted));
  EXPECT_TRUE(refused.IsClosed());
  leases.clear();
  ExpectServing();
}

TEST_F(ControlSocketTest, DropsAClientThatDoesNotReadItsReplies) {
  ControlClient client(path_);
  client.Hello();
  EXPECT_EQ(client.CreateRegion(kPage).message.status_code(), 0);

  while (client.SendWaiting("x")) {  // until the server has closed the connection
  }

  pinning_.WaitForPinned(0);
  ExpectServing();
}

TEST_F(ControlSocketTest, ClosesAllLeasesAndRemovesTheSocketAtItsEnd) {
  ControlClient client(path_);
  client.Hello();
  client.CreateRegion(kPage);

  socket_ = nullptr;

  EXPECT_TRUE(client.IsClosed());
  pinning_.WaitForPinned(0);
  EXPECT_NE(access(path_.c_str(), F_OK), 0);
}

TEST_F(ControlSocketTest, ReplacesALeftoverSocketButNotOneInUseNorAFile) {
  EXPECT_EQ(ControlSocket::Create({.path = path_}, *regions_).status().code(),
            absl::StatusCode::kUnavailable);
  ExpectServing();
  const std::string left_over = folder_.path("left_over");
  ASSERT_EQ(link(path_.c_str(), left_over.c_str()), 0);
  socket_ = nullptr;

  EXPECT_TRUE(ControlSocket::Create({.path = left_over}, *regions_).ok());
  const std::string name = folder_.path("a_file");
  ASSERT_EQ(symlink("/etc/passwd", name.c_str()), 0);
  EXPECT_EQ(ControlSocket::Create({.path = name}, *regions_).status().code(),
            absl::StatusCode::kInvalidArgument);
  unlink(name.c_str());
}

TEST_F(ControlSocketTest, SurvivesRandomPackets) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    ControlClient client(path_);
    if (round % 2 == 0) {
      client.Hello();
    }
    for (int i = 0; i < 20; ++i) {
      std::string packet(1 + random() % 200, '\0');
      for (char& c : packet) {
        c = static_cast<char>(random());
      }
      if (!client.Send(packet)) {
        break;
      }
      const auto reply = client.Receive();
      ASSERT_TRUE(reply.has_value());
      EXPECT_NE(reply->message.status_code(), 0);
    }
  }
  ExpectServing();
}

/// A packet that gets an error reply, after which the connection continues.
struct BadPacket {
  std::string name;
  std::string packet;
  bool after_hello;
  absl::StatusCode code;
  std::string message;
};

void PrintTo(const BadPacket& test, std::ostream* out) { *out << test.name; }

std::string CreatePacket(uint64_t bytes) {
  v1::LocalRequest request;
  request.mutable_create_region()->set_bytes(bytes);
  return request.SerializeAsString();
}

std::string ClosePacket(const std::string& id) {
  v1::LocalRequest request;
  request.mutable_close_region()->set_id(id);
  return request.SerializeAsString();
}

std::string HelloPacket(const std::string& client_id) {
  v1::LocalRequest request;
  request.mutable_hello()->set_client_id(client_id);
  return request.SerializeAsString();
}

class ControlSocketBadPacketTest : public ControlSocketTest,
                                   public ::testing::WithParamInterface<BadPacket> {};

TEST_P(ControlSocketBadPacketTest, IsAnsweredAndHarmsNothing) {
  const BadPacket& bad = GetParam();
  ControlClient client(path_);
  if (bad.after_hello) {
    ASSERT_EQ(client.Hello().status_code(), 0);
  }

  ASSERT_TRUE(client.Send(bad.packet));
  const auto reply = client.Receive();

  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->message.status_code(), Code(bad.code));
  EXPECT_THAT(reply->message.status_message(), HasSubstr(bad.message));
  EXPECT_FALSE(reply->file.is_open());
  if (!bad.after_hello) {
    ASSERT_EQ(client.Hello().status_code(), 0);
  }
  EXPECT_EQ(client.CreateRegion(8 * kPage).message.status_code(), 0);  // no budget is lost
  client.Close();
  pinning_.WaitForPinned(0);
}

INSTANTIATE_TEST_SUITE_P(
    Packets, ControlSocketBadPacketTest,
    ::testing::Values(
        BadPacket{"Garbage", "\xFF\xFF\xFF\xFF", false, absl::StatusCode::kInvalidArgument,
                  "not a well-formed message"},
        BadPacket{"GarbageAfterHello", std::string("\x12\x7Fshort", 7), true,
                  absl::StatusCode::kInvalidArgument, "not a well-formed message"},
        BadPacket{"Empty", "", true, absl::StatusCode::kInvalidArgument, "LocalRequest: empty"},
        BadPacket{"UnknownFieldOnly", "\xA0\x06\x01", true, absl::StatusCode::kInvalidArgument,
                  "LocalRequest: empty"},
        BadPacket{"Oversize", std::string(4'097, 'x'), false, absl::StatusCode::kInvalidArgument,
                  "more than 4096 bytes"},
        BadPacket{"HugeHello", HelloPacket(std::string(100'000, 'x')), false,
                  absl::StatusCode::kInvalidArgument, "more than 4096 bytes"},
        BadPacket{"CreateWithoutHello", CreatePacket(kPage), false,
                  absl::StatusCode::kFailedPrecondition, "send hello first"},
        BadPacket{"CloseWithoutHello", ClosePacket(std::string(16, 'x')), false,
                  absl::StatusCode::kFailedPrecondition, "send hello first"},
        BadPacket{"HelloTwice", HelloPacket("again"), true, absl::StatusCode::kInvalidArgument,
                  "sent twice"},
        BadPacket{"NoBytes", CreatePacket(0), true, absl::StatusCode::kInvalidArgument,
                  "create_region.bytes: 0, must be in [1, 32768]"},
        BadPacket{"TooManyBytes", CreatePacket(8 * kPage + 1), true,
                  absl::StatusCode::kInvalidArgument, "create_region.bytes: 32769"},
        BadPacket{"MostBytes", CreatePacket(~uint64_t{0}), true, absl::StatusCode::kInvalidArgument,
                  "create_region.bytes: 18446744073709551615"},
        BadPacket{"CloseOfNothing", ClosePacket(std::string(16, 'x')), true,
                  absl::StatusCode::kNotFound, "no such region"},
        BadPacket{"ShortId", ClosePacket("short"), true, absl::StatusCode::kInvalidArgument,
                  "close_region.id: 5 bytes, must be exactly 16"},
        BadPacket{"LongId", ClosePacket(std::string(17, 'x')), true,
                  absl::StatusCode::kInvalidArgument,
                  "close_region.id: 17 bytes, must be exactly 16"}),
    [](const ::testing::TestParamInfo<BadPacket>& test) { return test.param.name; });

TEST_F(ControlSocketTest, MapsNoFileThatAClientSends) {
  const FileDescriptor file(memfd_create("clients", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(file.get(), kPage), 0);
  ControlClient client(path_);
  client.Hello();
  v1::LocalRequest request;
  request.mutable_create_region()->set_bytes(kPage);

  ASSERT_TRUE(client.Send(request.SerializeAsString(), file.get()));
  const auto reply = client.Receive();

  ASSERT_TRUE(reply.has_value());
  MappedRegion mapped(*reply);
  mapped.bytes()[0] = std::byte{5};
  char first = 1;
  EXPECT_EQ(pread(file.get(), &first, 1, 0), 1);
  EXPECT_EQ(first, 0);  // the region is not the file of the client
}

TEST_F(ControlSocketTest, RefusesRegionsBeyondTheLimitsOfTheLeaseAndContinues) {
  ControlClient client(path_);
  client.Hello();
  EXPECT_EQ(client.CreateRegion(kPage).message.status_code(), 0);
  EXPECT_EQ(client.CreateRegion(kPage).message.status_code(), 0);

  const ControlReply refused = client.CreateRegion(kPage);

  EXPECT_EQ(refused.message.status_code(), Code(absl::StatusCode::kResourceExhausted));
  EXPECT_FALSE(refused.file.is_open());
  ExpectServing();
}

}  // namespace
}  // namespace logprobd::testing
