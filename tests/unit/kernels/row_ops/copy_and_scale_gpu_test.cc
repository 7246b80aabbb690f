#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/row_ops/copy_and_scale.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"
#include "tests/unit/kernels/fused/sixteen_bits.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;
using logprobd::testing::FromBits;
using logprobd::testing::ToBits;

const std::vector<int64_t> kRowIndices = {3, 0, 0, 6, 2};
constexpr size_t kNumSourceRows = 7;
const std::vector<float> kFactors = {0.5F, -1.3F, 0.0F, 1.0F, 3e-5F};
/// Number of elements after the last row, which must not be written.
constexpr size_t kGuard = 8;

class CopyRowsTest : public testing::GpuTest {};

/// Returns the copies of rows kRowIndices, followed by the guard, which holds 77.
template <typename Element>
std::vector<Element> Copy(const std::vector<Element>& values, size_t row_size, size_t stride,
                          const float* factors, Dtype dtype) {
  const DeviceArray<Element> source(values);
  const DeviceArray<int64_t> row_indices(kRowIndices);
  const DeviceArray<Element> rows(
      std::vector<Element>(kRowIndices.size() * row_size + kGuard, Element{77}));
  EXPECT_EQ(LaunchCopyRows({.num_rows = static_cast<int64_t>(kRowIndices.size()),
                            .row_indices = row_indices.data(),
                            .source = source.data(),
                            .source_stride_bytes = static_cast<int64_t>(stride * sizeof(Element)),
                            .row_bytes = static_cast<int64_t>(row_size * sizeof(Element)),
                            .factors = factors,
                            .dtype = dtype,
                            .rows = rows.data()},
                           nullptr),
            cudaSuccess);
  return rows.Read();
}

// The row sizes are below, at and above the number of threads of a block.
TEST_F(CopyRowsTest, CopiesRowsInTheOrderOfTheirIndices) {
  for (const size_t row_size : {4, 36, 512, 516, 2'048, 2'180}) {
    for (const size_t stride : {row_size, row_size + 12}) {
      std::vector<uint32_t> words(kNumSourceRows * stride);
      std::iota(words.begin(), words.end(), 1);

      const std::vector<uint32_t> rows = Copy(words, row_size, stride, nullptr, Dtype::kF32);

      std::vector<uint32_t> expected;
      for (const int64_t row : kRowIndices) {
        const auto first = words.begin() + row * static_cast<int64_t>(stride);
        expected.insert(expected.end(), first, first + static_cast<int64_t>(row_size));
      }
      expected.resize(rows.size(), 77);
      EXPECT_EQ(rows, expected) << row_size << " words per row, stride " << stride;
    }
  }
}

std::vector<float> Normal(size_t count) {
  std::mt19937 random(static_cast<uint32_t>(count));
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

TEST_F(CopyRowsTest, MultipliesSixteenBitRowsAndRoundsOnce) {
  const DeviceArray<float> factors(kFactors);
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    for (const size_t row_size : {8, 1'024, 1'032, 4'104}) {
      const size_t stride = row_size + 16;
      std::vector<uint16_t> values;
      for (const float value : Normal(kNumSourceRows * stride)) {
        values.push_back(ToBits(value, dtype));
      }

      const std::vector<uint16_t> rows = Copy(values, row_size, stride, factors.data(), dtype);

      for (size_t i = 0; i < kRowIndices.size() * row_size; ++i) {
        const size_t row = i / row_size;
        const size_t source = static_cast<size_t>(kRowIndices[row]) * stride + i % row_size;
        ASSERT_EQ(rows[i], ToBits(FromBits(values[source], dtype) * kFactors[row], dtype))
            << "row " << row << ", element " << i % row_size;
      }
      for (size_t i = rows.size() - kGuard; i < rows.size(); ++i) EXPECT_EQ(rows[i], 77);
    }
  }
}

TEST_F(CopyRowsTest, MultipliesFp32RowsInPlace) {
  constexpr size_t kRowSize = 516;
  constexpr int64_t kRowBytes = kRowSize * sizeof(float);
  const std::vector<float> values = Normal(kFactors.size() * kRowSize);
  const DeviceArray<float> rows(values);
  const DeviceArray<float> factors(kFactors);

  ASSERT_EQ(LaunchCopyRows({.num_rows = static_cast<int64_t>(kFactors.size()),
                            .source = rows.data(),
                            .source_stride_bytes = kRowBytes,
                            .row_bytes = kRowBytes,
                            .factors = factors.data(),
                            .dtype = Dtype::kF32,
                            .rows = rows.data()},
                           nullptr),
            cudaSuccess);

  const std::vector<float> products = rows.Read();
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(products[i], values[i] * kFactors[i / kRowSize]) << i;
  }
}

TEST_F(CopyRowsTest, RefusesBrokenBoundsAndDoesNothingForNoRows) {
  EXPECT_EQ(LaunchCopyRows({}, nullptr), cudaSuccess);
  EXPECT_EQ(LaunchCopyRows({.num_rows = 1}, nullptr), cudaErrorInvalidValue);
  const DeviceArray<uint32_t> words(std::vector<uint32_t>(32, 0));
  const CopyRowsParams whole = {.num_rows = 1,
                                .source = words.data(),
                                .source_stride_bytes = 16,
                                .row_bytes = 16,
                                .rows = words.data() + 16};
  EXPECT_EQ(LaunchCopyRows(whole, nullptr), cudaSuccess);
  for (const auto& break_bound :
       {+[](CopyRowsParams& params) { params.row_bytes = 8; },
        +[](CopyRowsParams& params) { params.source_stride_bytes = 24; },
        +[](CopyRowsParams& params) { params.num_rows = int64_t{1} << 31; },
        +[](CopyRowsParams& params) { params.num_rows = -1; },
        +[](CopyRowsParams& params) { params.rows = static_cast<uint8_t*>(params.rows) + 8; }}) {
    CopyRowsParams params = whole;
    break_bound(params);
    EXPECT_EQ(LaunchCopyRows(params, nullptr), cudaErrorInvalidValue);
  }
}

/// Number of elements after the scaled ones, which must not be written.
constexpr size_t kScaleGuard = 16;

/// Scales all values except the guard at the end, and returns all of them.
template <typename Bits>
std::vector<Bits> Scale(const std::vector<Bits>& values, Dtype dtype, float factor) {
  const DeviceArray<Bits> array(values);
  const DeviceArray<float> factor_array(std::vector<float>{factor});
  EXPECT_EQ(
      LaunchScaleUnlessOne(array.data(), dtype, static_cast<int64_t>(values.size() - kScaleGuard),
                           factor_array.data(), nullptr),
      cudaSuccess);
  return array.Read();
}

/// Returns the expected result: the fp32 product, rounded to the element.
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
  for (size_t i = 0; i < count + kScaleGuard; ++i) {
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

// Counts at the edges of a vector and of a block, and one that gives every thread a second vector.
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

TEST_F(ScaleUnlessOneTest, AFactorOfOneChangesNoBit) {
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

TEST_F(ScaleUnlessOneTest, AFactorOfNanPropagates) {
  const std::vector<uint32_t> ones(9 + kScaleGuard, std::bit_cast<uint32_t>(1.0F));

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
