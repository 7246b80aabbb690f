#include "kernels/common/arena.h"

#include <array>
#include <cstddef>
#include <cstdint>

#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

struct Arrays {
  float* first = nullptr;
  double* absent = nullptr;
  uint8_t* last = nullptr;
};

Arrays Place(Arena& arena) {
  Arrays arrays;
  arrays.first = arena.Take<float>(65);
  arrays.absent = arena.Take<double>(1'000, /*is_needed=*/false);
  arrays.last = arena.Take<uint8_t>(1);
  return arrays;
}

TEST(ArenaTest, ComputesWithoutMemoryTheSizeOfWhatItPlaces) {
  Arena sizes;
  const Arrays nowhere = Place(sizes);
  alignas(kArenaAlignment) std::array<std::byte, 1'024> memory;
  Arena arena(memory.data());
  const Arrays arrays = Place(arena);

  EXPECT_EQ(nowhere.first, nullptr);
  EXPECT_EQ(sizes.size(), 3 * kArenaAlignment);  // 260 bytes take two alignments
  EXPECT_EQ(arena.size(), sizes.size());
  EXPECT_EQ(reinterpret_cast<std::byte*>(arrays.first), memory.data());
  EXPECT_EQ(arrays.absent, nullptr);
  EXPECT_EQ(reinterpret_cast<std::byte*>(arrays.last), memory.data() + 2 * kArenaAlignment);
}

TEST(ArenaTest, ExtendsToWholeAlignmentsAndNeverShrinks) {
  Arena arena;
  arena.Take<uint8_t>(1);
  arena.ExtendTo(kArenaAlignment + 1);
  EXPECT_EQ(arena.size(), 2 * kArenaAlignment);
  arena.ExtendTo(1);
  EXPECT_EQ(arena.size(), 2 * kArenaAlignment);
}

}  // namespace
}  // namespace logprobd::kernels
