// Tests the AMX kernel with emulated instructions, so that packing, addressing and remainders are
// tested on CPUs without AMX. tile_kernels_test tests the real instructions.

#include <immintrin.h>  // included before macros below replace its names

#include <cstdint>
#include <cstring>

#include "gtest/gtest.h"
#include "kernels/cpu/tile_kernels.h"
#include "tests/unit/kernels/cpu/dot_kernel_checks.h"

namespace {

struct EmulatedTile {
  uint8_t bytes[16][64];
};

EmulatedTile tiles[8];
int tile_configurations = 0;

float Bf16(const uint8_t* from) {
  uint16_t half = 0;
  std::memcpy(&half, from, sizeof(half));
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void LoadTile(int tile, const void* from, int64_t stride) {
  for (int64_t row = 0; row < 16; ++row) {
    std::memcpy(tiles[tile].bytes[row], static_cast<const uint8_t*>(from) + row * stride, 64);
  }
}

void StoreTile(int tile, void* to, int64_t stride) {
  for (int64_t row = 0; row < 16; ++row) {
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, tiles[tile].bytes[row], 64);
  }
}

void MultiplyTiles(int sums, int left, int right) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      float even = 0;
      float odd = 0;
      for (int pair = 0; pair < 16; ++pair) {
        const uint8_t* a = &tiles[left].bytes[row][pair * 4];
        const uint8_t* b = &tiles[right].bytes[pair][column * 4];
        even += Bf16(a) * Bf16(b);
        odd += Bf16(a + 2) * Bf16(b + 2);
      }
      float sum = 0;
      std::memcpy(&sum, &tiles[sums].bytes[row][column * 4], sizeof(sum));
      sum += even + odd;
      std::memcpy(&tiles[sums].bytes[row][column * 4], &sum, sizeof(sum));
    }
  }
}

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) (void)(config), ++tile_configurations
#define _tile_release() --tile_configurations
#define _tile_zero(tile) std::memset(&tiles[tile], 0, sizeof(EmulatedTile))
#define _tile_loadd(tile, from, stride) LoadTile(tile, from, stride)
#define _tile_stored(tile, to, stride) StoreTile(tile, to, stride)
#define _tile_dpbf16ps(sums, left, right) MultiplyTiles(sums, left, right)
#define AmxBf16Dots EmulatedAmxBf16Dots
namespace logprobd::kernels::internal {
const DotKernel& EmulatedAmxBf16Dots();
}  // namespace logprobd::kernels::internal
#include "kernels/cpu/kernels_amx_bf16.cc"

namespace logprobd::kernels {
namespace {

TEST(EmulatedAmxTest, DotProductsAreExactAndDoNotDependOnOtherRows) {
  testing::CheckDotKernel(internal::EmulatedAmxBf16Dots(), Dtype::kBf16, Dtype::kBf16);

  EXPECT_EQ(tile_configurations, 0);  // each configuration was released
}

}  // namespace
}  // namespace logprobd::kernels
