#include <cstddef>
#include <cstdint>
#include <numeric>
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

const std::vector<int64_t> kPlaces = {3, 0, 0, 6, 2};
constexpr size_t kNumSourceRows = 7;
const std::vector<float> kFactors = {0.5F, -1.3F, 0.0F, 1.0F, 3e-5F};
/// Elements behind the last row that are not to be touched.
constexpr size_t kGuard = 8;

class CopyRowsTest : public testing::GpuTest {};

/// The rows at kPlaces, and a guard of 77.
template <typename Element>
std::vector<Element> Copy(const std::vector<Element>& values, size_t row_size, size_t stride,
                          const float* factors, Dtype dtype) {
  const DeviceArray<Element> source(values);
  const DeviceArray<int64_t> row_indices(kPlaces);
  const DeviceArray<Element> rows(
      std::vector<Element>(kPlaces.size() * row_size + kGuard, Element{77}));
  EXPECT_EQ(LaunchCopyRows({.num_rows = static_cast<int64_t>(kPlaces.size()),
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

// Sizes of less than a block's threads, of as many, and more.
TEST_F(CopyRowsTest, RowsLieTogetherInTheOrderOfTheirPlaces) {
  for (const size_t row_size : {4, 36, 512, 516, 2'048, 2'180}) {
    for (const size_t stride : {row_size, row_size + 12}) {
      std::vector<uint32_t> words(kNumSourceRows * stride);
      std::iota(words.begin(), words.end(), 1);

      const std::vector<uint32_t> rows = Copy(words, row_size, stride, nullptr, Dtype::kF32);

      std::vector<uint32_t> wanted;
      for (const int64_t place : kPlaces) {
        const auto first = words.begin() + place * static_cast<int64_t>(stride);
        wanted.insert(wanted.end(), first, first + static_cast<int64_t>(row_size));
      }
      wanted.resize(rows.size(), 77);
      EXPECT_EQ(rows, wanted) << row_size << " words a row, " << stride << " apart";
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

TEST_F(CopyRowsTest, SixteenBitRowsAreTheirProductsRoundedOnce) {
  const DeviceArray<float> factors(kFactors);
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    for (const size_t row_size : {8, 1'024, 1'032, 4'104}) {
      const size_t stride = row_size + 16;
      std::vector<uint16_t> values;
      for (const float value : Normal(kNumSourceRows * stride)) {
        values.push_back(ToBits(value, dtype));
      }

      const std::vector<uint16_t> rows = Copy(values, row_size, stride, factors.data(), dtype);

      for (size_t i = 0; i < kPlaces.size() * row_size; ++i) {
        const size_t row = i / row_size;
        const size_t place = static_cast<size_t>(kPlaces[row]) * stride + i % row_size;
        ASSERT_EQ(rows[i], ToBits(FromBits(values[place], dtype) * kFactors[row], dtype))
            << "row " << row << ", element " << i % row_size;
      }
      for (size_t i = rows.size() - kGuard; i < rows.size(); ++i) EXPECT_EQ(rows[i], 77);
    }
  }
}

TEST_F(CopyRowsTest, SumsAreMultipliedWhereTheyLie) {
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

}  // namespace
}  // namespace logprobd::kernels
