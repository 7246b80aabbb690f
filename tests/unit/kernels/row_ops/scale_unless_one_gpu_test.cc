#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/row_ops/copy_and_scale.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"
#include "tests/unit/kernels/fused_sm90/sixteen_bits.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;
using logprobd::testing::FromBits;
using logprobd::testing::ToBits;

/// Elements behind the last that are not to be touched.
constexpr size_t kGuard = 16;

/// `count` elements of the values, scaled; a guard stands behind them.
template <typename Bits>
std::vector<Bits> Scale(const std::vector<Bits>& values, Dtype dtype, float factor) {
  const DeviceArray<Bits> array(values);
  const DeviceArray<float> factor_array(std::vector<float>{factor});
  EXPECT_EQ(LaunchScaleUnlessOne(array.data(), dtype, static_cast<int64_t>(values.size() - kGuard),
                                 factor_array.data(), nullptr),
            cudaSuccess);
  return array.Read();
}

/// What a scaled element is: the product in fp32, rounded to the element.
uint16_t Scaled(uint16_t bits, Dtype dtype, float factor) {
  return ToBits(FromBits(bits, dtype) * factor, dtype);
}
uint32_t Scaled(uint32_t bits, Dtype /*dtype*/, float factor) {
  return std::bit_cast<uint32_t>(std::bit_cast<float>(bits) * factor);
}

template <typename Bits>
std::vector<Bits> MakeValues(size_t count, Dtype dtype) {
  std::mt19937 random(static_cast<uint32_t>(count));
  std::normal_distribution<float> normal;
  std::vector<Bits> values;
  for (size_t i = 0; i < count + kGuard; ++i) {
    const float value = normal(random);
    values.push_back(sizeof(Bits) == 2 ? static_cast<Bits>(ToBits(value, dtype))
                                       : static_cast<Bits>(std::bit_cast<uint32_t>(value)));
  }
  return values;
}

template <typename Bits>
void ExpectProducts(size_t count, Dtype dtype, float factor) {
  const std::vector<Bits> values = MakeValues<Bits>(count, dtype);

  const std::vector<Bits> scaled = Scale(values, dtype, factor);

  for (size_t i = 0; i < count; ++i) {
    ASSERT_EQ(scaled[i], Scaled(values[i], dtype, factor))
        << "element " << i << " of " << count << ", factor " << factor;
  }
  for (size_t i = count; i < values.size(); ++i) ASSERT_EQ(scaled[i], values[i]) << "guard " << i;
}

class ScaleUnlessOneTest : public testing::GpuTest {};

// Counts at the edges of a vector and of a block, and one that takes each thread a second time.
constexpr size_t kCounts[] = {1, 3, 7, 8, 9, 1'023, 1'024, 1'025, 2'047, 2'049, 2'200'003};

TEST_F(ScaleUnlessOneTest, MultipliesEveryElementOnce) {
  for (const size_t count : kCounts) {
    for (const float factor : {0.5F, -1.0F, 0.3F, 0.0F, 1.0000001F}) {
      ExpectProducts<uint16_t>(count, Dtype::kBf16, factor);
      ExpectProducts<uint16_t>(count, Dtype::kF16, factor);
      ExpectProducts<uint32_t>(count, Dtype::kF32, factor);
    }
  }
}

TEST_F(ScaleUnlessOneTest, AFactorOfOneLeavesEveryBitAlone) {
  std::vector<uint16_t> sixteen;
  for (uint32_t bits = 0; bits < 0x10000U; ++bits) sixteen.push_back(static_cast<uint16_t>(bits));
  std::vector<uint32_t> wide;  // quiet and signalling NaN with payloads, infinities, subnormals
  for (const uint32_t bits : {0x7FC0BEEFU, 0xFFA00001U, 0x7F800001U, 0x7F800000U, 0x80000001U}) {
    wide.insert(wide.end(), 1'000, bits);
  }

  EXPECT_EQ(Scale(sixteen, Dtype::kBf16, 1.0F), sixteen);
  EXPECT_EQ(Scale(sixteen, Dtype::kF16, 1.0F), sixteen);
  EXPECT_EQ(Scale(wide, Dtype::kF32, 1.0F), wide);
}

TEST_F(ScaleUnlessOneTest, AFactorThatIsNotFiniteShows) {
  const std::vector<uint32_t> ones(9 + kGuard, std::bit_cast<uint32_t>(1.0F));

  const std::vector<uint32_t> scaled = Scale(ones, Dtype::kF32, NAN);

  for (size_t i = 0; i < 9; ++i) EXPECT_TRUE(std::isnan(std::bit_cast<float>(scaled[i])));
}

TEST_F(ScaleUnlessOneTest, RefusesBrokenBounds) {
  const DeviceArray<uint16_t> values(std::vector<uint16_t>(64));
  const DeviceArray<float> factor(std::vector<float>{2.0F});
  const auto launch = [&](void* at, int64_t count, const float* factor_at) {
    return LaunchScaleUnlessOne(at, Dtype::kBf16, count, factor_at, nullptr);
  };

  EXPECT_EQ(launch(values.data(), 64, factor.data()), cudaSuccess);
  EXPECT_EQ(launch(values.data() + 8, 56, factor.data()), cudaSuccess);
  EXPECT_EQ(launch(nullptr, 0, nullptr), cudaSuccess);
  EXPECT_EQ(launch(values.data(), -1, factor.data()), cudaErrorInvalidValue);
  EXPECT_EQ(launch(nullptr, 64, factor.data()), cudaErrorInvalidValue);
  EXPECT_EQ(launch(values.data(), 64, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(launch(values.data() + 1, 63, factor.data()), cudaErrorInvalidValue);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::kernels
