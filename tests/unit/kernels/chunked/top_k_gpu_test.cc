#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/chunked/logit_chunk.h"
#include "kernels/common/logit_key.h"
#include "kernels/common/tile.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;

std::vector<uint64_t> TopKReference(const std::vector<float>& row, int32_t top_k) {
  std::vector<uint64_t> keys;
  for (size_t id = 0; id < row.size(); ++id) {
    keys.push_back(LogitKey(row[id], static_cast<int32_t>(id)));
  }
  keys.resize(std::max(keys.size(), static_cast<size_t>(top_k)));
  std::partial_sort(keys.begin(), keys.begin() + top_k, keys.end(), std::greater<>());
  keys.resize(static_cast<size_t>(top_k));
  return keys;
}

/// Top-k of rows of equal width, `tiles_a_chunk` tiles at a time.
std::vector<uint64_t> RunTopK(const std::vector<std::vector<float>>& rows, int32_t top_k,
                              int64_t tiles_a_chunk) {
  const auto vocab_size = static_cast<int64_t>(rows[0].size());
  const int64_t num_tiles = NumTiles(vocab_size);
  std::vector<float> padded;
  for (const std::vector<float>& row : rows) {
    padded.insert(padded.end(), row.begin(), row.end());
    padded.resize(padded.size() + static_cast<size_t>(num_tiles * kTileColumns - vocab_size),
                  1e30F);
  }
  const DeviceArray<float> logits(padded);
  const DeviceArray<uint64_t> keys(
      std::vector<uint64_t>(rows.size() * static_cast<size_t>(top_k), 0));
  for (int64_t tile = 0; tile < num_tiles; tile += tiles_a_chunk) {
    TopKParams params;
    params.chunk.dots = logits.data() + tile * kTileColumns;
    params.chunk.row_stride = num_tiles * kTileColumns;
    params.chunk.num_rows = static_cast<int64_t>(rows.size());
    params.chunk.tile_begin = tile;
    params.chunk.num_tiles = std::min(tiles_a_chunk, num_tiles - tile);
    params.chunk.vocab_size = vocab_size;
    params.top_k = top_k;
    params.keys = keys.data();
    EXPECT_EQ(LaunchTopK(params, nullptr), cudaSuccess);
  }
  return keys.Read();
}

class TopKTest : public testing::GpuTest {
 protected:
  static void ExpectRight(const std::vector<std::vector<float>>& rows) {
    for (const int32_t top_k : {1, 2, 20, 127, 128}) {
      for (const int64_t tiles : {1, 7, 1000}) {
        SCOPED_TRACE(::testing::Message() << "k " << top_k << ", tiles " << tiles);
        const std::vector<uint64_t> keys = RunTopK(rows, top_k, tiles);
        for (size_t row = 0; row < rows.size(); ++row) {
          const auto begin = keys.begin() + static_cast<int64_t>(row) * top_k;
          ASSERT_EQ(std::vector<uint64_t>(begin, begin + top_k), TopKReference(rows[row], top_k));
        }
      }
    }
  }
};

TEST_F(TopKTest, FindsTheBestOfRandomRows) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0F, 3.0F);
  for (const size_t vocab_size : {1U, 100U, 192U, 1'023U, 1'024U, 1'025U, 10'007U}) {
    std::vector<std::vector<float>> rows(4, std::vector<float>(vocab_size));
    for (auto& row : rows) std::generate(row.begin(), row.end(), [&] { return normal(random); });
    ExpectRight(rows);
  }
}

TEST_F(TopKTest, FindsTheBestOfRisingAndFallingRows) {
  std::vector<float> rising(9'001);
  std::iota(rising.begin(), rising.end(), -4'000.0F);
  const std::vector<float> falling(rising.rbegin(), rising.rend());
  ExpectRight({rising, falling});
}

TEST_F(TopKTest, EqualLogitsKeepTheLowestIds) {
  std::vector<float> flat(5'000, 0.25F);
  std::vector<float> zeros(5'000, 0.0F);
  for (size_t i = 0; i < zeros.size(); i += 3) zeros[i] = -0.0F;
  ExpectRight({flat, zeros});
}

}  // namespace
}  // namespace logprobd::kernels
