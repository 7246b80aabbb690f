#include "client/cli/bench/row_pool.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::Ge;
using ::testing::Lt;

Head SmallHead() {
  Head head;
  head.name = "h";
  head.hidden_size = 64;
  head.vocab_size = 100;
  return head;
}

RowPool MakePool(const Head& head, Dtype dtype, int64_t rows, uint64_t seed = 1) {
  return *RowPool::Create(head, dtype, rows, seed);
}

TEST(RowPoolTest, IsTheSameForTheSameSeed) {
  const RowPool one = MakePool(SmallHead(), Dtype::kBf16, 10, 1);
  const RowPool again = MakePool(SmallHead(), Dtype::kBf16, 10, 1);
  const RowPool other = MakePool(SmallHead(), Dtype::kBf16, 10, 2);

  EXPECT_EQ(one.hidden(), again.hidden());
  EXPECT_EQ(one.targets(), again.targets());
  EXPECT_NE(one.hidden(), other.hidden());
}

TEST(RowPoolTest, IsStandardNormalWithTargetsInTheVocabulary) {
  const RowPool pool = MakePool(SmallHead(), Dtype::kF32, 1'000);
  ASSERT_EQ(pool.distinct_rows(), 1'000);
  std::vector<float> values(64'000);
  std::memcpy(values.data(), pool.hidden().data(), values.size() * sizeof(float));

  double sum = 0;
  double squares = 0;
  for (const float value : values) {
    sum += value;
    squares += static_cast<double>(value) * value;
  }
  // The tolerances are six standard errors of 64,000 draws.
  EXPECT_NEAR(sum / 64'000, 0, 0.025);
  EXPECT_NEAR(squares / 64'000, 1, 0.035);
  EXPECT_THAT(pool.targets(), Each(AllOf(Ge(0), Lt(100))));
}

TEST(RowPoolTest, RepeatsTheRowsOfALargeRequest) {
  Head head = SmallHead();
  head.hidden_size = 4096;

  const RowPool pool = MakePool(head, Dtype::kBf16, 1'025);

  ASSERT_EQ(pool.distinct_rows(), 1'024);
  const size_t row_bytes = 4096 * 2;
  EXPECT_EQ(pool.hidden().subspan(0, row_bytes),
            pool.hidden().subspan(1'024 * row_bytes, row_bytes));
  EXPECT_EQ(pool.targets()[0], pool.targets()[1'024]);
}

TEST(RowPoolTest, HasManyDistinctRowsEvenForSmallRequests) {
  EXPECT_EQ(MakePool(SmallHead(), Dtype::kBf16, 1).distinct_rows(), 256);
}

TEST(RowPoolTest, FillsRowsInACircle) {
  const RowPool pool = MakePool(SmallHead(), Dtype::kF16, 1);
  std::vector<std::byte> hidden(300 * 128);
  std::vector<int32_t> targets(300);

  pool.Fill(/*first=*/250, 300, absl::MakeSpan(hidden), absl::MakeSpan(targets));

  for (const int64_t row : {0, 5, 6, 261, 262, 299}) {
    const int64_t from = (250 + row) % 256;
    EXPECT_EQ(std::memcmp(hidden.data() + row * 128, pool.hidden().data() + from * 128, 128), 0)
        << row;
    EXPECT_EQ(targets[static_cast<size_t>(row)], pool.targets()[static_cast<size_t>(from)]) << row;
  }
}

TEST(RowPoolTest, ReturnsTheErrorOfItsMemory) {
  const auto pool = RowPool::Create(SmallHead(), Dtype::kBf16, int64_t{1} << 55, 1);

  EXPECT_EQ(pool.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(AllocateHeapRowsTest, ReportsAnAllocationThatIsTooLarge) {
  EXPECT_EQ(AllocateHeapRows(int64_t{1} << 62).status().code(),
            absl::StatusCode::kResourceExhausted);
  const absl::StatusOr<RowBuffer> buffer = AllocateHeapRows(4'096);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(buffer->bytes().size(), 4'096U);
}

TEST(FloatFormatsTest, RoundsToBf16ToNearestEven) {
  EXPECT_EQ(ToBf16(1.0F), 0x3F80);
  EXPECT_EQ(ToBf16(1.00390625F), 0x3F80);  // halfway: rounds to the even neighbour below
  EXPECT_EQ(ToBf16(1.01171875F), 0x3F82);  // halfway: rounds to the even neighbour above
  EXPECT_EQ(ToBf16(-2.0F), 0xC000);
  EXPECT_EQ(ToBf16(std::numeric_limits<float>::infinity()), 0x7F80);
}

TEST(FloatFormatsTest, RoundsToF16ToNearestEven) {
  EXPECT_EQ(ToF16(0.0F), 0x0000);
  EXPECT_EQ(ToF16(1.0F), 0x3C00);
  EXPECT_EQ(ToF16(-1.5F), 0xBE00);
  EXPECT_EQ(ToF16(1.0F + 0x1p-11F), 0x3C00);  // halfway: rounds to the even neighbour below
  EXPECT_EQ(ToF16(1.0F + 0x3p-11F), 0x3C02);  // halfway: rounds to the even neighbour above
  EXPECT_EQ(ToF16(2047.75F), 0x6800);         // rounds into the next power of two
  EXPECT_EQ(ToF16(65504.0F), 0x7BFF);
  EXPECT_EQ(ToF16(1e6F), 0x7C00);
  EXPECT_EQ(ToF16(0x1p-14F), 0x0400);  // smallest normal number
  EXPECT_EQ(ToF16(0x1p-24F), 0x0001);  // smallest subnormal number
  EXPECT_EQ(ToF16(0x1p-26F), 0x0000);
}

}  // namespace
}  // namespace logprobd::client
