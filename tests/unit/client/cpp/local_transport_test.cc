#include "client/cpp/local_transport.h"

#include <sys/wait.h>
#include <unistd.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_control_socket.h"
#include "tests/unit/client/cpp/score_case.h"

namespace logprobd::client {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int64_t kLargeRows = 5'000;  // 80,000 bytes

LocalAccess AccessTo(const testing::FakeControlSocket& control) {
  const v1::LocalAccess access = control.access();
  return {.boot_id = access.boot_id(), .control_path = access.control_path()};
}

class LocalTransportTest : public ::testing::Test {
 protected:
  std::unique_ptr<LocalTransport> Make(TransportChoice choice = TransportChoice::kAuto) {
    auto local =
        std::make_unique<LocalTransport>(LocalTransport::Options{.choice = choice,
                                                                 .address = "host:1",
                                                                 .client_id = "trainer",
                                                                 .region_bytes = 1 << 20,
                                                                 .now = [this] { return now_; }});
    local->Offer(AccessTo(control_));
    return local;
  }

  /// Places rows [0, rows) of the case.
  static Placement MustPlace(LocalTransport& local, const ScoreCase& c) {
    absl::StatusOr<Placement> placed = local.Place(c.args, Whole(c));
    EXPECT_TRUE(placed.ok()) << placed.status();
    return placed.ok() ? *std::move(placed) : Placement{};
  }

  static Chunk Whole(const ScoreCase& c) { return {.row_begin = 0, .row_end = c.args.rows}; }

  static DeviceRows OnDevice(const ScoreCase& c) {
    DeviceRows rows = {.offset = 32, .bytes = static_cast<int64_t>(c.hidden.size())};
    rows.device_uuid.fill(7);
    return rows;
  }

  absl::Time now_ = absl::UnixEpoch();
  testing::FakeControlSocket control_{{.device_memory = std::string(1 << 20, 'd')}};
};

TEST_F(LocalTransportTest, CopiesRowsIntoARegionThatTheServerSees) {
  const ScoreCase c(kLargeRows);
  const auto local = Make();

  const Placement placement = MustPlace(*local, c);

  ASSERT_EQ(placement.transport, Transport::kSharedMemory);
  EXPECT_EQ(placement.reason, "");
  const absl::Span<const std::byte> memory = placement.shared->memory();
  EXPECT_EQ(std::vector<std::byte>(memory.begin(), memory.end()), c.hidden);
}

TEST_F(LocalTransportTest, FreesTheSlotWithThePlacement) {
  const ScoreCase c(kLargeRows);
  const auto local = Make();

  const int64_t first = MustPlace(*local, c).shared->offset;
  const Placement second = MustPlace(*local, c);
  const Placement third = MustPlace(*local, c);

  EXPECT_EQ(second.shared->offset, first);
  EXPECT_NE(third.shared->offset, first);
  EXPECT_EQ(control_.num_regions(), 1);
}

TEST_F(LocalTransportTest, SendsSmallRequestsAndEmptyOnesInTheirMessage) {
  const auto local = Make();

  const Placement small = MustPlace(*local, ScoreCase(10));
  const Placement none = MustPlace(*local, ScoreCase(0));

  EXPECT_EQ(small.transport, Transport::kTcp);
  EXPECT_THAT(small.reason,
              HasSubstr("for 160 bytes, sending the rows inside the request is faster"));
  EXPECT_EQ(none.transport, Transport::kTcp);
  EXPECT_THAT(control_.clients(), SizeIs(0));
}

TEST_F(LocalTransportTest, SendsRowsOfABufferWithoutACopy) {
  const auto local = Make();
  ScoreCase c(kLargeRows);
  const absl::StatusOr<RowBuffer> buffer =
      local->AllocateRows(static_cast<int64_t>(c.hidden.size()));
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  c.args.hidden = buffer->bytes();

  // The first row of a chunk determines its alignment: 4 rows are 64 bytes.
  const auto aligned = local->Place(c.args, {.row_begin = 4, .row_end = 8});
  const auto moved = local->Place(c.args, {.row_begin = 1, .row_end = kLargeRows});

  EXPECT_TRUE(buffer->is_shared());
  ASSERT_TRUE(aligned.ok());
  EXPECT_EQ(aligned->shared->memory().data(), buffer->bytes().data() + 64);
  EXPECT_EQ(aligned->slot, nullptr);
  ASSERT_TRUE(moved.ok());
  EXPECT_NE(moved->slot, nullptr);
}

TEST_F(LocalTransportTest, AllocatesOrdinaryMemoryIfNoneIsShared) {
  const auto local = Make();
  local->Offer(std::nullopt);

  absl::StatusOr<RowBuffer> buffer = local->AllocateRows(100);
  const absl::StatusOr<RowBuffer> forced = [&] {
    const auto shm = Make(TransportChoice::kSharedMemory);
    shm->Offer(std::nullopt);
    return shm->AllocateRows(100);
  }();

  ASSERT_TRUE(buffer.ok());
  EXPECT_FALSE(buffer->is_shared());
  EXPECT_THAT(buffer->bytes(), SizeIs(100));
  EXPECT_EQ(forced.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(local->AllocateRows(-1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(local->AllocateRows(0).ok());
}

TEST_F(LocalTransportTest, LeavesABufferReadableThatOutlivesIt) {
  auto local = Make();
  absl::StatusOr<RowBuffer> buffer = local->AllocateRows(4096);
  ASSERT_TRUE(buffer.ok());
  local.reset();

  std::fill(buffer->bytes().begin(), buffer->bytes().end(), std::byte{3});

  EXPECT_EQ(buffer->bytes()[4095], std::byte{3});
  control_.WaitForNoLease();
}

TEST_F(LocalTransportTest, PassesOnWhereRowsLieOnADevice) {
  ScoreCase c(10);
  c.args.device_rows = OnDevice(c);
  const auto local = Make();

  const absl::StatusOr<Placement> placed = local->Place(c.args, {.row_begin = 2, .row_end = 5});

  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->transport, Transport::kCudaIpc);
  EXPECT_EQ(placed->device->offset, 32 + 2 * 16);
  EXPECT_EQ(placed->device->bytes, 3 * 16);
  EXPECT_EQ(placed->lease->grant().lease, "lease-1");
}

TEST_F(LocalTransportTest, FallsBackToRowsOfTheHostWhereTheDevicesCannotBeRead) {
  ScoreCase c(kLargeRows);
  c.args.device_rows = OnDevice(c);
  c.args.device_rows->offset = 8;
  const auto local = Make();

  const Placement placement = MustPlace(*local, c);

  EXPECT_EQ(placement.transport, Transport::kSharedMemory);
  EXPECT_THAT(placement.reason, HasSubstr("must begin at a multiple of 16"));
}

TEST_F(LocalTransportTest, SaysThatRowsOfADeviceNeedRowsOfTheHostToo) {
  ScoreCase c(kLargeRows);
  c.args.device_rows = OnDevice(c);
  c.args.hidden = {};
  const auto local = Make();
  local->Offer(std::nullopt);

  const absl::Status status = local->Place(c.args, Whole(c)).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("give the rows as hidden too"));
}

TEST_F(LocalTransportTest, RemembersADeviceThatTheServerDoesNotReach) {
  ScoreCase c(kLargeRows);
  c.args.device_rows = OnDevice(c);
  const auto local = Make();

  EXPECT_TRUE(local->Refused(MustPlace(*local, c),
                             absl::FailedPreconditionError("cuda_ipc: a GPU of another")));
  now_ += absl::Hours(1);

  const Placement placement = MustPlace(*local, c);
  EXPECT_EQ(placement.transport, Transport::kSharedMemory);
  EXPECT_THAT(placement.reason, HasSubstr("a GPU of another"));
}

// Regression: one bad handle disabled the GPU for the lifetime of the lease.
TEST_F(LocalTransportTest, TriesADeviceAgainAfterTooManyMappingsOrMemoryThatCouldNotBeRead) {
  for (const absl::Status& refusal :
       {absl::ResourceExhaustedError("cuda_ipc: 64 mappings are open"),
        absl::InvalidArgumentError("cuda_ipc.handle: no memory")}) {
    SCOPED_TRACE(refusal.message());
    ScoreCase c(kLargeRows);
    c.args.device_rows = OnDevice(c);
    const auto local = Make();
    EXPECT_TRUE(local->Refused(MustPlace(*local, c), refusal));
    EXPECT_EQ(MustPlace(*local, c).transport, Transport::kSharedMemory);

    now_ += LocalTransport::kRetryAfter;

    EXPECT_EQ(MustPlace(*local, c).transport, Transport::kCudaIpc);
  }
}

// Regression: every later call failed with UNAVAILABLE.
TEST_F(LocalTransportTest, ABadHandleFailsItsCallAloneWhereDevicesAreChosen) {
  ScoreCase c(kLargeRows);
  c.args.device_rows = OnDevice(c);
  const auto local = Make(TransportChoice::kCudaIpc);

  EXPECT_FALSE(local->Refused(MustPlace(*local, c),
                              absl::InvalidArgumentError("cuda_ipc.handle: no memory")));

  EXPECT_EQ(MustPlace(*local, c).transport, Transport::kCudaIpc);
}

// Regression: the error advised the caller to change weights_version.
TEST_F(LocalTransportTest, ARefusalOfTheChosenTransportIsUnavailable) {
  ScoreCase c(kLargeRows);
  c.args.device_rows = OnDevice(c);
  const auto local = Make(TransportChoice::kCudaIpc);
  const Placement placement = MustPlace(*local, c);
  const absl::Status bad_rows = absl::InvalidArgumentError("targets[0] is 9");

  const absl::Status refused =
      local->ErrorOf(placement, absl::FailedPreconditionError("cuda_ipc: a GPU of another"));

  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(
      std::string(refused.message()),
      HasSubstr("transport is cuda-ipc, which is not available at host:1: cuda_ipc: a GPU"));
  EXPECT_EQ(local->ErrorOf(placement, bad_rows), bad_rows);
}

TEST_F(LocalTransportTest, RefusesToAllocateMoreMemoryThanThereIs) {
  for (const TransportChoice choice : {TransportChoice::kAuto, TransportChoice::kTcp}) {
    const absl::StatusOr<RowBuffer> buffer =
        Make(choice)->AllocateRows(std::numeric_limits<int64_t>::max());

    EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
  }
}

TEST_F(LocalTransportTest, UsesMessagesWhereTheServerCannotBeReached) {
  const ScoreCase c(kLargeRows);
  const auto reason = [&](const std::optional<LocalAccess>& access) {
    const auto local = Make();
    local->Offer(access);
    const Placement placement = MustPlace(*local, c);
    EXPECT_EQ(placement.transport, Transport::kTcp);
    return placement.reason;
  };
  LocalAccess access = AccessTo(control_);

  EXPECT_EQ(reason(std::nullopt), "the server has no control socket");
  access.control_path = "/nowhere/c.sock";
  EXPECT_THAT(reason(access), HasSubstr("mount the folder"));
  access.boot_id = "other";
  EXPECT_EQ(reason(access), "the server runs on another host");
}

TEST_F(LocalTransportTest, UsesMessagesWhereTheServerSharesNothing) {
  const testing::FakeControlSocket bare({.shared_memory = false});
  const auto local = Make();
  local->Offer(AccessTo(bare));
  ScoreCase c(kLargeRows);
  c.args.device_rows = OnDevice(c);

  const Placement placement = MustPlace(*local, c);

  EXPECT_EQ(placement.transport, Transport::kTcp);
  EXPECT_EQ(placement.reason,
            "the server does not read GPU memory of other processes; the server shares no memory");
}

TEST_F(LocalTransportTest, UsesMessagesAboveTheServersLimits) {
  const testing::FakeControlSocket narrow({.lease_bytes_max = 8192});
  const auto local = Make();
  local->Offer(AccessTo(narrow));

  const Placement placement = MustPlace(*local, ScoreCase(kLargeRows));

  EXPECT_EQ(placement.transport, Transport::kTcp);
  EXPECT_THAT(placement.reason, HasSubstr("limits on shared memory"));
}

TEST_F(LocalTransportTest, TriesSharedMemoryAgainLater) {
  const ScoreCase c(kLargeRows);
  const auto local = Make();
  local->Offer(LocalAccess{.boot_id = BootId(), .control_path = "/nowhere/c.sock"});
  EXPECT_EQ(MustPlace(*local, c).transport, Transport::kTcp);
  local->Offer(AccessTo(control_));
  EXPECT_EQ(MustPlace(*local, c).transport, Transport::kTcp);

  now_ += LocalTransport::kRetryAfter;

  EXPECT_EQ(MustPlace(*local, c).transport, Transport::kSharedMemory);
}

TEST_F(LocalTransportTest, ConnectsAgainWhenTheServerEndedTheLease) {
  const ScoreCase c(kLargeRows);
  const auto local = Make();
  const Placement first = MustPlace(*local, c);
  control_.DropLeases();

  const Placement second = MustPlace(*local, c);

  EXPECT_EQ(second.transport, Transport::kSharedMemory);
  EXPECT_NE(second.lease, first.lease);
}

TEST_F(LocalTransportTest, ConnectsOnceAgainWhenSlicesAreRefusedAndThenUsesMessages) {
  const ScoreCase c(kLargeRows);
  const auto local = Make();
  const absl::Status lost = absl::NotFoundError("shared_memory: no such region");

  const Placement first = MustPlace(*local, c);
  EXPECT_TRUE(local->Refused(first, lost));
  const Placement second = MustPlace(*local, c);
  EXPECT_EQ(second.transport, Transport::kSharedMemory);
  EXPECT_TRUE(local->Refused(first, lost));  // the placement belongs to the first lease
  EXPECT_TRUE(local->Refused(second, lost));

  const Placement third = MustPlace(*local, c);
  EXPECT_EQ(third.transport, Transport::kTcp);
  EXPECT_EQ(third.reason, lost.message());
  EXPECT_FALSE(local->Refused(third, lost));
}

TEST_F(LocalTransportTest, DistinguishesRefusalsOfThePlacementFromRefusalsOfTheRequest) {
  EXPECT_TRUE(IsPlacementRefusal(absl::InvalidArgumentError("shared_memory.offset is 3")));
  EXPECT_TRUE(IsPlacementRefusal(absl::FailedPreconditionError("cuda_ipc: another GPU")));
  EXPECT_TRUE(IsPlacementRefusal(absl::NotFoundError("no such region")));
  EXPECT_FALSE(IsPlacementRefusal(absl::InvalidArgumentError("targets[3] is 9")));
  EXPECT_FALSE(IsPlacementRefusal(absl::ResourceExhaustedError("the queue is full: please wait")));
  EXPECT_FALSE(IsPlacementRefusal(absl::UnavailableError("cuda_ipc: stopping")));
  EXPECT_FALSE(IsPlacementRefusal(absl::OkStatus()));
}

TEST_F(LocalTransportTest, SendsSmallRequestsThroughMemoryWhenThatIsChosen) {
  const auto local = Make(TransportChoice::kSharedMemory);

  EXPECT_EQ(MustPlace(*local, ScoreCase(1)).transport, Transport::kSharedMemory);
}

TEST_F(LocalTransportTest, OpensNoSocketWhenTcpIsChosen) {
  ScoreCase c(kLargeRows);
  c.args.device_rows = OnDevice(c);
  const auto local = Make(TransportChoice::kTcp);

  const Placement placement = MustPlace(*local, c);

  EXPECT_EQ(placement.transport, Transport::kTcp);
  EXPECT_EQ(placement.reason, "transport is tcp");
  EXPECT_THAT(control_.clients(), SizeIs(0));
}

TEST_F(LocalTransportTest, SaysWhyTheChosenTransportIsNotAvailable) {
  ScoreCase c(kLargeRows);
  const auto shm = Make(TransportChoice::kSharedMemory);
  const auto cuda = Make(TransportChoice::kCudaIpc);
  shm->Offer(std::nullopt);
  cuda->Offer(std::nullopt);

  const absl::Status no_memory = shm->Place(c.args, Whole(c)).status();
  const absl::Status no_rows = cuda->Place(c.args, Whole(c)).status();
  c.args.device_rows = OnDevice(c);
  const absl::Status no_device = cuda->Place(c.args, Whole(c)).status();

  EXPECT_EQ(no_memory.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(no_memory.message(),
            "transport is shm, which is not available at host:1: the server has no control socket");
  EXPECT_EQ(no_rows.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(no_device.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(no_device.message()), HasSubstr("transport is cuda-ipc"));
}

TEST_F(LocalTransportTest, GivesUpAChosenTransportThatIsRefused) {
  ScoreCase c(kLargeRows);
  c.args.device_rows = OnDevice(c);
  const auto shm = Make(TransportChoice::kSharedMemory);
  const auto cuda = Make(TransportChoice::kCudaIpc);
  const absl::Status lost = absl::NotFoundError("shared_memory: no such region");

  EXPECT_TRUE(shm->Refused(MustPlace(*shm, c), lost));
  EXPECT_FALSE(shm->Refused(MustPlace(*shm, c), lost));
  EXPECT_FALSE(cuda->Refused(MustPlace(*cuda, c), absl::InvalidArgumentError("cuda_ipc: handle")));
}

TEST_F(LocalTransportTest, HasALeaseOfItsOwnInAForkedChild) {
  const ScoreCase c(kLargeRows);
  const auto local = Make();
  const Placement parents = MustPlace(*local, c);

  const pid_t child = fork();
  if (child == 0) {
    absl::StatusOr<Placement> placed = local->Place(c.args, Whole(c));
    const bool own = placed.ok() && placed->transport == Transport::kSharedMemory &&
                     placed->lease->grant().lease != parents.lease->grant().lease;
    _exit(own ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);

  EXPECT_EQ(status, 0);
  EXPECT_TRUE(parents.lease->IsAlive());
  EXPECT_EQ(MustPlace(*local, c).lease, parents.lease);
}

TEST_F(LocalTransportTest, PlacesRowsInRequestsOnceItIsClosed) {
  const auto local = Make();

  local->Close();

  EXPECT_EQ(MustPlace(*local, ScoreCase(kLargeRows)).transport, Transport::kTcp);
}

TEST_F(LocalTransportTest, RemembersTheTransportOfTheLatestCall) {
  const auto local = Make();
  EXPECT_EQ(local->last(), Transport::kTcp);
  EXPECT_EQ(local->last_reason(), "nothing has been scored yet");

  local->Used(Transport::kSharedMemory, "why");

  EXPECT_EQ(local->last(), Transport::kSharedMemory);
  EXPECT_EQ(local->last_reason(), "why");
}

TEST(TransportTest, HasNamesAndChoicesByName) {
  EXPECT_EQ(TransportName(Transport::kTcp), "tcp");
  EXPECT_EQ(TransportName(Transport::kUnix), "unix");
  EXPECT_EQ(TransportName(Transport::kSharedMemory), "shm");
  EXPECT_EQ(TransportName(Transport::kCudaIpc), "cuda_ipc");
  EXPECT_EQ(*ParseTransportChoice("auto"), TransportChoice::kAuto);
  EXPECT_EQ(*ParseTransportChoice("tcp"), TransportChoice::kTcp);
  EXPECT_EQ(*ParseTransportChoice("shm"), TransportChoice::kSharedMemory);
  EXPECT_EQ(*ParseTransportChoice("cuda-ipc"), TransportChoice::kCudaIpc);
  EXPECT_THAT(std::string(ParseTransportChoice("rdma").status().message()),
              HasSubstr("transport is \"rdma\", must be auto, tcp, shm or cuda-ipc"));
}

}  // namespace
}  // namespace logprobd::client
