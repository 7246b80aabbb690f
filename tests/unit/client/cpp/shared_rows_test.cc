#include "client/cpp/shared_rows.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_control_socket.h"

namespace logprobd::client {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPage = 4096;
using SpanPointer = std::shared_ptr<const SharedSpan>;

class RegionPoolTest : public ::testing::Test {
 protected:
  RegionPoolTest() {
    const v1::LocalAccess access = control_.access();
    lease_ = *LocalLease::Connect(
        {.boot_id = access.boot_id(), .control_path = access.control_path()}, "");
    pool_ = std::make_shared<RegionPool>(lease_, 64 * kPage);
  }

  SpanPointer Allocate(int64_t bytes) {
    absl::StatusOr<SpanPointer> span = pool_->Allocate(bytes);
    EXPECT_TRUE(span.ok()) << span.status();
    return *std::move(span);
  }

  testing::FakeControlSocket control_{
      {.region_bytes_max = 256 * kPage, .lease_bytes_max = 400 * kPage, .lease_regions_max = 3}};
  std::shared_ptr<LocalLease> lease_;
  std::shared_ptr<RegionPool> pool_;
};

TEST_F(RegionPoolTest, CutsARegionIntoSpansThatDoNotOverlap) {
  const SpanPointer first = Allocate(1);
  const SpanPointer second = Allocate(kPage + 1);
  const SpanPointer third = Allocate(10);

  EXPECT_EQ(control_.num_regions(), 1);
  EXPECT_EQ(first->offset, 0);
  EXPECT_EQ(second->offset, kPage);
  EXPECT_EQ(third->offset, 3 * kPage);
  EXPECT_EQ(second->memory().size(), static_cast<size_t>(kPage + 1));
}

TEST_F(RegionPoolTest, MergesAdjacentFreedSpans) {
  std::vector<SpanPointer> spans;
  for (int i = 0; i < 3; ++i) spans.push_back(Allocate(20 * kPage));
  for (const size_t freed : {0, 2, 1}) spans[freed] = nullptr;

  EXPECT_EQ(Allocate(64 * kPage)->offset, 0);
  EXPECT_EQ(control_.num_regions(), 1);
}

TEST_F(RegionPoolTest, TracksFreeSpaceInAnyOrderOfAllocatingAndFreeing) {
  std::mt19937 random(5);
  std::vector<SpanPointer> held;
  for (int turn = 0; turn < 2'000; ++turn) {
    if (!held.empty() && (held.size() > 12 || random() % 2 == 0)) {
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
    } else {
      held.push_back(Allocate(1 + static_cast<int64_t>(random() % (5 * kPage))));
    }
    std::sort(held.begin(), held.end(), [](const SpanPointer& a, const SpanPointer& b) {
      return a->memory().data() < b->memory().data();
    });
    for (size_t i = 1; i < held.size(); ++i) {
      ASSERT_LE(held[i - 1]->memory().data() + held[i - 1]->bytes, held[i]->memory().data());
    }
  }
  held.clear();

  EXPECT_EQ(Allocate(64 * kPage)->offset, 0);
}

TEST_F(RegionPoolTest, AddsARegionWhenOneIsFull) {
  const SpanPointer first = Allocate(60 * kPage);
  const SpanPointer second = Allocate(10 * kPage);

  EXPECT_EQ(control_.num_regions(), 2);
  EXPECT_NE(first->region, second->region);
}

TEST_F(RegionPoolTest, ReturnsALargeRegionOnceItIsFree) {
  Allocate(1);
  SpanPointer large = Allocate(100 * kPage);
  EXPECT_EQ(control_.num_regions(), 2);

  large = nullptr;

  EXPECT_EQ(control_.num_regions(), 1);
  EXPECT_EQ(pool_->num_regions(), 1);
}

TEST_F(RegionPoolTest, KeepsTheServersLimits) {
  const std::vector<SpanPointer> held = {Allocate(200 * kPage), Allocate(150 * kPage),
                                         Allocate(50 * kPage)};

  const absl::Status status = pool_->Allocate(1).status();

  EXPECT_EQ(held[2]->region->bytes().size(),
            static_cast<size_t>(50 * kPage));  // the rest of the lease
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("limits on shared memory"));
  EXPECT_EQ(pool_->Allocate(300 * kPage).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(RegionPoolTest, HasNoMoreRegionsThanTheServerAllows) {
  std::vector<SpanPointer> held;
  for (int i = 0; i < 3; ++i) held.push_back(Allocate(60 * kPage));

  const absl::Status status = pool_->Allocate(60 * kPage).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(control_.num_regions(), 3);
}

TEST_F(RegionPoolTest, ARegionOfTheUsualSizeMayUseUpTheLease) {
  const std::vector<SpanPointer> held = {Allocate(200 * kPage), Allocate(136 * kPage)};

  const SpanPointer span = Allocate(1);

  EXPECT_EQ(span->region->bytes().size(), static_cast<size_t>(64 * kPage));
}

TEST_F(RegionPoolTest, PassesOnErrorsOfTheLease) {
  control_.DropLeases();

  EXPECT_EQ(pool_->Allocate(1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pool_->Allocate(1).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(RegionPoolTest, FindsBytesThatLieInARegion) {
  const SpanPointer span = Allocate(2 * kPage);
  const absl::Span<std::byte> memory = span->memory();
  const std::vector<std::byte> elsewhere(16);

  const std::optional<SharedSpan> found = pool_->Find(memory.subspan(64, 100));

  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->region, span->region);
  EXPECT_EQ(found->offset, 64);
  EXPECT_EQ(found->bytes, 100);
  EXPECT_FALSE(pool_->Find(elsewhere).has_value());
  EXPECT_FALSE(pool_->Find({memory.data(), span->region->bytes().size() + 1}).has_value());
}

TEST_F(RegionPoolTest, LeavesMemoryToASpanThatOutlivesIt) {
  const SpanPointer span = Allocate(kPage);
  pool_ = nullptr;
  lease_->Close();

  std::fill(span->memory().begin(), span->memory().end(), std::byte{5});

  EXPECT_EQ(span->memory().back(), std::byte{5});
}

std::vector<std::byte> Pattern(size_t bytes, size_t seed) {
  std::vector<std::byte> values(bytes);
  for (size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::byte>((i + seed) * 37 % 253);
  return values;
}

TEST(CopyPoolTest, CopiesEveryByteWhateverTheSizeAndTheThreads) {
  constexpr size_t kPart = size_t{512} << 10;
  for (const int threads : {0, 1, 3}) {
    CopyPool pool(threads);
    for (const size_t bytes : {size_t{0}, size_t{1}, kPart, 2 * kPart, 7 * kPart + 13}) {
      const std::vector<std::byte> from = Pattern(bytes, bytes);
      std::vector<std::byte> to(bytes);

      pool.Copy(from, absl::MakeSpan(to));

      ASSERT_EQ(to, from) << bytes << " bytes, " << threads << " threads";
    }
  }
}

TEST(CopyPoolTest, KeepsItsThreadsForTheNextCopy) {
  const auto num_threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  };
  const std::vector<std::byte> from = Pattern(size_t{8} << 20, 1);
  std::vector<std::byte> to(from.size());
  const auto before = num_threads();
  CopyPool pool(3);

  for (int turn = 0; turn < 20; ++turn) pool.Copy(from, absl::MakeSpan(to));

  EXPECT_EQ(num_threads(), before + 3);
}

TEST(CopyPoolTest, ServesManyThreadsAtOnce) {
  CopyPool pool(2);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 6; ++i) {
    threads.emplace_back([&pool, i] {
      const std::vector<std::byte> from = Pattern((size_t{2} << 20) + i, i);
      for (int turn = 0; turn < 20; ++turn) {
        std::vector<std::byte> to(from.size());
        pool.Copy(from, absl::MakeSpan(to));
        ASSERT_EQ(to, from);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace logprobd::client
