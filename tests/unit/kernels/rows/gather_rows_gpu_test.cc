#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/rows/gather_rows.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;

constexpr int64_t kWordBytes = sizeof(uint32_t);
constexpr uint32_t kPoison = 0xDEADBEEF;

class GatherRowsTest : public testing::GpuTest {};

void ExpectGathered(int64_t row_words, int64_t stride_words) {
  const std::vector<int64_t> places = {3, 0, 0, 6, 2};
  std::vector<uint32_t> words(static_cast<size_t>(7 * stride_words));
  std::iota(words.begin(), words.end(), 1);
  const DeviceArray<uint32_t> source(words);
  const DeviceArray<int64_t> index(places);
  const size_t size = places.size() * static_cast<size_t>(row_words);
  const DeviceArray<uint32_t> rows(std::vector<uint32_t>(size + 8, kPoison));

  ASSERT_EQ(LaunchGatherRows({.num_rows = static_cast<int64_t>(places.size()),
                              .places = index.data(),
                              .source = source.data(),
                              .source_stride_bytes = stride_words * kWordBytes,
                              .row_bytes = row_words * kWordBytes,
                              .rows = rows.data()},
                             nullptr),
            cudaSuccess);

  std::vector<uint32_t> wanted;
  for (const int64_t place : places) {
    const auto first = words.begin() + place * stride_words;
    wanted.insert(wanted.end(), first, first + row_words);
  }
  wanted.resize(size + 8, kPoison);
  EXPECT_EQ(rows.Read(), wanted) << row_words << " words a row, " << stride_words << " apart";
}

TEST_F(GatherRowsTest, RowsLieTogetherInTheOrderOfTheirPlaces) {
  for (const int64_t row_words : {4, 36, 512, 516, 2'048, 2'180}) {
    ExpectGathered(row_words, row_words);
    ExpectGathered(row_words, row_words + 12);
  }
}

TEST_F(GatherRowsTest, RefusesBrokenBoundsAndDoesNothingForNoRows) {
  EXPECT_EQ(LaunchGatherRows({}, nullptr), cudaSuccess);
  EXPECT_EQ(LaunchGatherRows({.num_rows = 1}, nullptr), cudaErrorInvalidValue);
  const DeviceArray<uint32_t> words(std::vector<uint32_t>(32, 0));
  const DeviceArray<int64_t> index(std::vector<int64_t>{0});
  const GatherRowsParams whole = {.num_rows = 1,
                                  .places = index.data(),
                                  .source = words.data(),
                                  .source_stride_bytes = 16,
                                  .row_bytes = 16,
                                  .rows = words.data() + 16};
  EXPECT_EQ(LaunchGatherRows(whole, nullptr), cudaSuccess);
  for (const auto& break_bound :
       {+[](GatherRowsParams& params) { params.row_bytes = 8; },
        +[](GatherRowsParams& params) { params.source_stride_bytes = 24; },
        +[](GatherRowsParams& params) { params.num_rows = int64_t{1} << 31; },
        +[](GatherRowsParams& params) { params.rows = static_cast<uint8_t*>(params.rows) + 8; }}) {
    GatherRowsParams params = whole;
    break_bound(params);
    EXPECT_EQ(LaunchGatherRows(params, nullptr), cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace logprobd::kernels
