#include "server/transport/shared_regions.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_client_memory.h"

namespace logprobd::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kPage = 4'096;

class SharedRegionsTest : public ::testing::Test {
 protected:
  void Make(const SharedRegions::Options& options) {
    auto regions = SharedRegions::Create(options, pinning_, metrics_);
    ASSERT_TRUE(regions.ok()) << regions.status();
    regions_ = *std::move(regions);
    lease_ = *regions_->OpenLease();
  }
  void SetUp() override { Make({}); }

  SharedRegions::Created CreateRegion(uint64_t bytes) {
    auto created = regions_->CreateRegion(lease_, bytes);
    EXPECT_TRUE(created.ok()) << created.status();
    return created.ok() ? *std::move(created) : SharedRegions::Created();
  }
  absl::Status Refusal(uint64_t bytes) { return regions_->CreateRegion(lease_, bytes).status(); }
  HiddenPayload Find(const RandomId& region, int64_t offset, int64_t bytes) {
    auto payload = regions_->Find({.region = region, .offset = offset, .bytes = bytes});
    EXPECT_TRUE(payload.ok()) << payload.status();
    return payload.ok() ? *std::move(payload) : HiddenPayload();
  }
  absl::StatusCode FindCode(const RandomId& region, int64_t offset, int64_t bytes) {
    return regions_->Find({.region = region, .offset = offset, .bytes = bytes}).status().code();
  }
  bool MetricsShow(const std::string& text) {
    return metrics_.Serialize().find(text + "\n") != std::string::npos;
  }

  FakePinning pinning_;
  Metrics metrics_{Metrics::Options{}};
  std::unique_ptr<SharedRegions> regions_;
  RandomId lease_ = {};
};

TEST_F(SharedRegionsTest, CreatesMemoryThatBothSidesSee) {
  const SharedRegions::Created region = CreateRegion(100'000);
  ASSERT_EQ(region.bytes, 25 * kPage);
  void* client =
      mmap(nullptr, 25 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, region.file.get(), 0);
  ASSERT_NE(client, MAP_FAILED);
  std::memset(static_cast<std::byte*>(client) + 128, 7, 64);

  const HiddenPayload payload = Find(region.id, 128, 64);

  EXPECT_EQ(payload.place, PayloadPlace::kSharedMemory);
  EXPECT_TRUE(payload.is_pinned);
  EXPECT_EQ(payload.bytes, 64);
  ASSERT_EQ(payload.pieces.size(), 1U);
  EXPECT_THAT(payload.pieces[0], Each(std::byte{7}));
  EXPECT_EQ(Find(region.id, 0, 25 * kPage).bytes, 25 * kPage);
  munmap(client, 25 * kPage);
}

TEST_F(SharedRegionsTest, SealsTheMemoryAgainstItsClient) {
  const SharedRegions::Created region = CreateRegion(2 * kPage);

  EXPECT_EQ(ftruncate(region.file.get(), kPage), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(ftruncate(region.file.get(), 3 * kPage), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(fcntl(region.file.get(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_NE(fcntl(region.file.get(), F_GETFD) & FD_CLOEXEC, 0);
}

// No seal that allows the client to write prevents holes.
TEST_F(SharedRegionsTest, ReadsHolesThatItsClientPunchesAsZeros) {
  const SharedRegions::Created region = CreateRegion(2 * kPage);
  const HiddenPayload payload = Find(region.id, 0, 2 * kPage);
  ASSERT_EQ(pwrite(region.file.get(), "rows", 4, kPage), 4);

  ASSERT_EQ(fallocate(region.file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 2 * kPage),
            0);

  EXPECT_THAT(payload.pieces[0], Each(std::byte{0}));
}

TEST_F(SharedRegionsTest, RefusesSlicesBeyondTheRegion) {
  const SharedRegions::Created region = CreateRegion(2 * kPage);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

  for (const auto& [offset, bytes] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 2 * kPage + 1}, {64, 2 * kPage}, {2 * kPage, 1}, {kMost - 63, 0}, {0, kMost}}) {
    EXPECT_EQ(FindCode(region.id, offset, bytes), absl::StatusCode::kInvalidArgument)
        << offset << " " << bytes;
  }
  EXPECT_EQ(FindCode(region.id, 2 * kPage, 0), absl::StatusCode::kOk);
}

TEST_F(SharedRegionsTest, GivesTheSameErrorForUnknownRegionsAndRegionsOfOthers) {
  const SharedRegions::Created region = CreateRegion(kPage);
  const RandomId other_lease = *regions_->OpenLease();

  const absl::Status of_another = regions_->CloseRegion(other_lease, region.id);
  const absl::Status unknown = regions_->CloseRegion(other_lease, RandomId());

  EXPECT_EQ(of_another.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(of_another, unknown);
  EXPECT_EQ(regions_->Find({.region = RandomId()}).status(), unknown);
  EXPECT_EQ(FindCode(region.id, 0, 64), absl::StatusCode::kOk);
}

TEST_F(SharedRegionsTest, GivesEachRegionAndLeaseAnIdOfItsOwn) {
  EXPECT_NE(CreateRegion(kPage).id, CreateRegion(kPage).id);
  EXPECT_NE(*regions_->OpenLease(), lease_);
}

TEST_F(SharedRegionsTest, KeepsTheMemoryOfARegionUntilItsLastReaderReleasesIt) {
  const SharedRegions::Created region = CreateRegion(kPage);
  HiddenPayload payload = Find(region.id, 0, 64);

  EXPECT_TRUE(regions_->CloseRegion(lease_, region.id).ok());

  EXPECT_EQ(FindCode(region.id, 0, 64), absl::StatusCode::kNotFound);
  EXPECT_EQ(pinning_.pinned_bytes(), kPage);
  EXPECT_THAT(payload.pieces[0], Each(std::byte{0}));
  payload = HiddenPayload();
  pinning_.WaitForPinned(0);
}

TEST_F(SharedRegionsTest, TakesBackAllRegionsOfALeaseThatEnds) {
  const SharedRegions::Created first = CreateRegion(kPage);
  const SharedRegions::Created second = CreateRegion(2 * kPage);
  const RandomId other_lease = *regions_->OpenLease();
  const auto others = regions_->CreateRegion(other_lease, 4 * kPage);
  EXPECT_TRUE(MetricsShow("logprobd_shm_regions 3"));
  EXPECT_TRUE(MetricsShow("logprobd_shm_bytes 28672"));

  regions_->CloseLease(lease_);

  pinning_.WaitForPinned(4 * kPage);
  EXPECT_EQ(FindCode(first.id, 0, 64), absl::StatusCode::kNotFound);
  EXPECT_EQ(FindCode(second.id, 0, 64), absl::StatusCode::kNotFound);
  EXPECT_EQ(FindCode(others->id, 0, 64), absl::StatusCode::kOk);
  EXPECT_FALSE(regions_->HasLease(lease_));
  EXPECT_TRUE(regions_->HasLease(other_lease));
  EXPECT_EQ(Refusal(kPage).code(), absl::StatusCode::kNotFound);
}

TEST_F(SharedRegionsTest, PayloadsMayOutliveTheTable) {
  HiddenPayload payload = Find(CreateRegion(kPage).id, 0, 64);

  regions_ = nullptr;

  EXPECT_EQ(pinning_.pinned_bytes(), kPage);
  EXPECT_THAT(payload.pieces[0], Each(std::byte{0}));
  payload = HiddenPayload();
  EXPECT_EQ(pinning_.pinned_bytes(), 0);
  EXPECT_TRUE(MetricsShow("logprobd_shm_regions 0"));
  EXPECT_TRUE(MetricsShow("logprobd_shm_bytes 0"));
}

TEST_F(SharedRegionsTest, EnforcesItsLimits) {
  Make({.bytes_max = 16 * kPage,
        .region_bytes_max = 4 * kPage,
        .lease_bytes_max = 10 * kPage,
        .lease_regions_max = 3});

  EXPECT_EQ(Refusal(0).code(), absl::StatusCode::kInvalidArgument);
  const absl::Status too_large = Refusal(4 * kPage + 1);
  EXPECT_EQ(too_large.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(too_large.message()), HasSubstr("must be in [1, 16384]"));
  EXPECT_EQ(Refusal(~uint64_t{0}).code(), absl::StatusCode::kInvalidArgument);
  const SharedRegions::Created region = CreateRegion(4 * kPage);
  CreateRegion(4 * kPage);
  const absl::Status of_lease = Refusal(3 * kPage);
  EXPECT_EQ(of_lease.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(of_lease.message()), HasSubstr("of this lease"));
  CreateRegion(kPage);
  const absl::Status too_many = Refusal(kPage);
  EXPECT_EQ(too_many.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(too_many.message()), HasSubstr("at most 3 regions"));

  lease_ = *regions_->OpenLease();
  CreateRegion(4 * kPage);
  const absl::Status of_all = Refusal(4 * kPage);
  EXPECT_EQ(of_all.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(of_all.message()), HasSubstr("--shared-memory-bytes 64.0 KiB"));
  CreateRegion(3 * kPage);
}

TEST_F(SharedRegionsTest, ALimitIsAtMostThatWhichContainsIt) {
  const auto limits_of = [this](int64_t all, int64_t lease, int64_t region) {
    Make({.bytes_max = all, .region_bytes_max = region, .lease_bytes_max = lease});
    const SharedRegions::Options& options = regions_->options();
    return std::vector<int64_t>{options.bytes_max, options.lease_bytes_max,
                                options.region_bytes_max};
  };

  EXPECT_THAT(limits_of(8, 4, 2), ElementsAre(8, 4, 2));
  EXPECT_THAT(limits_of(8, 4, 6), ElementsAre(8, 4, 4));
  EXPECT_THAT(limits_of(8, 9, 6), ElementsAre(8, 8, 6));
  EXPECT_THAT(limits_of(8, 9, 10), ElementsAre(8, 8, 8));
}

TEST_F(SharedRegionsTest, HasTheDocumentedLimits) {
  const SharedRegions::Options& options = regions_->options();

  EXPECT_EQ(options.bytes_max, int64_t{2} << 30);
  EXPECT_EQ(options.lease_bytes_max, int64_t{1} << 30);
  EXPECT_EQ(options.region_bytes_max, int64_t{512} << 20);
  EXPECT_EQ(options.lease_regions_max, 64);
}

TEST_F(SharedRegionsTest, ALeaseMayUseAllOfItsBytes) {
  Make({.bytes_max = 16 * kPage, .lease_bytes_max = 4 * kPage});
  const SharedRegions::Created first = CreateRegion(3 * kPage);
  EXPECT_EQ(Refusal(2 * kPage).code(), absl::StatusCode::kResourceExhausted);
  CreateRegion(kPage);
  EXPECT_EQ(Refusal(1).code(), absl::StatusCode::kResourceExhausted);

  ASSERT_TRUE(regions_->CloseRegion(lease_, first.id).ok());

  CreateRegion(3 * kPage);
}

TEST_F(SharedRegionsTest, GivesClosedMemoryToTheNextRegion) {
  Make({.bytes_max = 4 * kPage,
        .region_bytes_max = 4 * kPage,
        .lease_bytes_max = 4 * kPage,
        .lease_regions_max = 1});
  for (int i = 0; i < 20; ++i) {
    const SharedRegions::Created region = CreateRegion(4 * kPage);
    ASSERT_TRUE(regions_->CloseRegion(lease_, region.id).ok());
  }
}

TEST_F(SharedRegionsTest, CountsMemoryThatIsStillReadAgainstTheTotalLimit) {
  Make({.bytes_max = 4 * kPage});
  const SharedRegions::Created region = CreateRegion(4 * kPage);
  HiddenPayload payload = Find(region.id, 0, 64);
  ASSERT_TRUE(regions_->CloseRegion(lease_, region.id).ok());

  EXPECT_EQ(Refusal(kPage).code(), absl::StatusCode::kResourceExhausted);

  payload = HiddenPayload();
  CreateRegion(4 * kPage);
}

TEST_F(SharedRegionsTest, LosesNothingWhenMemoryCannotBePinned) {
  Make({.bytes_max = 4 * kPage, .lease_regions_max = 1});
  pinning_.FailWith(absl::ResourceExhaustedError("no more memory to pin"));

  EXPECT_EQ(Refusal(4 * kPage).message(), "no more memory to pin");

  EXPECT_TRUE(MetricsShow("logprobd_shm_regions 0"));
  pinning_.FailWith(absl::OkStatus());
  CreateRegion(4 * kPage);
}

TEST_F(SharedRegionsTest, CanBeSwitchedOff) {
  Make({.bytes_max = 0});

  EXPECT_FALSE(regions_->is_on());
  EXPECT_EQ(Refusal(kPage).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(regions_->HasLease(lease_));
}

}  // namespace
}  // namespace logprobd::testing
