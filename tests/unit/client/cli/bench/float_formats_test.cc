#include "client/cli/bench/float_formats.h"

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

TEST(FloatFormatsTest, RoundsToBf16ToNearestEven) {
  EXPECT_EQ(ToBf16(1.0F), 0x3F80);
  EXPECT_EQ(ToBf16(1.00390625F), 0x3F80);  // half way: to the even neighbour below
  EXPECT_EQ(ToBf16(1.01171875F), 0x3F82);  // half way: to the even neighbour above
  EXPECT_EQ(ToBf16(-2.0F), 0xC000);
  EXPECT_EQ(ToBf16(std::numeric_limits<float>::infinity()), 0x7F80);
}

TEST(FloatFormatsTest, RoundsToF16ToNearestEven) {
  EXPECT_EQ(ToF16(0.0F), 0x0000);
  EXPECT_EQ(ToF16(1.0F), 0x3C00);
  EXPECT_EQ(ToF16(-1.5F), 0xBE00);
  EXPECT_EQ(ToF16(1.0F + 0x1p-11F), 0x3C00);  // half way: to the even neighbour below
  EXPECT_EQ(ToF16(1.0F + 0x3p-11F), 0x3C02);  // half way: to the even neighbour above
  EXPECT_EQ(ToF16(2047.75F), 0x6800);         // rounds into the next power of two
  EXPECT_EQ(ToF16(65504.0F), 0x7BFF);
  EXPECT_EQ(ToF16(1e6F), 0x7C00);
  EXPECT_EQ(ToF16(0x1p-14F), 0x0400);  // least normal
  EXPECT_EQ(ToF16(0x1p-24F), 0x0001);  // least subnormal
  EXPECT_EQ(ToF16(0x1p-26F), 0x0000);
}

TEST(FloatFormatsTest, LoadsWhatItStored) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    // Representable in all three; the array is not aligned.
    const std::vector<float> values = {0, 1, -1.5F, 0x1p-14F, -96};
    std::vector<std::byte> bytes(1 + values.size() * 4);
    for (size_t i = 0; i < values.size(); ++i) {
      StoreElement(values[i], dtype,
                   bytes.data() + 1 + static_cast<int64_t>(i) * DtypeBytes(dtype));
    }

    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(LoadElement(bytes.data() + 1, static_cast<int64_t>(i), dtype),
                static_cast<double>(values[i]))
          << DtypeName(dtype);
    }
  }
}

TEST(FloatFormatsTest, LoadsEveryKindOfF16) {
  const auto load = [](uint16_t bits) {
    return LoadElement(reinterpret_cast<const std::byte*>(&bits), 0, Dtype::kF16);
  };

  EXPECT_EQ(load(0x0001), 0x1p-24);
  EXPECT_EQ(load(0x83FF), -0x1.FF8p-15);  // largest subnormal
  EXPECT_EQ(load(0x7BFF), 65'504);
  EXPECT_EQ(load(0xFC00), -std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(load(0x7E00)));
}

}  // namespace
}  // namespace logprobd::client
