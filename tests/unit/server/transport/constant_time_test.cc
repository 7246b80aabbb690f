#include "server/transport/constant_time.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace logprobd {
namespace {

/// A byte that counts its comparisons. It has no other operator, so that a comparison that ends at
/// the first difference, such as == of arrays or memcmp, does not compile.
struct CountedByte {
  uint8_t value = 0;
  static inline int comparisons = 0;

  friend uint8_t operator^(const CountedByte& a, const CountedByte& b) {
    ++comparisons;
    return a.value ^ b.value;
  }
};

using Digest = std::array<CountedByte, 32>;

Digest DigestWith(size_t position, uint8_t value) {
  Digest digest;
  digest[position].value = value;
  return digest;
}

class ConstantTimeTest : public ::testing::Test {
 protected:
  ConstantTimeTest() { CountedByte::comparisons = 0; }
};

TEST_F(ConstantTimeTest, ComparesAllBytesWhereverADifferenceIs) {
  EXPECT_TRUE(AreEqualInConstantTime(Digest(), Digest()));
  EXPECT_EQ(CountedByte::comparisons, 32);
  for (size_t position = 0; position < 32; ++position) {
    for (int bit = 0; bit < 8; ++bit) {
      CountedByte::comparisons = 0;
      const auto value = static_cast<uint8_t>(1 << bit);
      EXPECT_FALSE(AreEqualInConstantTime(Digest(), DigestWith(position, value))) << position;
      EXPECT_EQ(CountedByte::comparisons, 32) << position;
    }
  }
}

TEST_F(ConstantTimeTest, DifferencesDoNotCancelEachOther) {
  Digest other = DigestWith(0, 0x5A);
  other[31].value = 0x5A;
  EXPECT_FALSE(AreEqualInConstantTime(Digest(), other));
}

TEST_F(ConstantTimeTest, ComparesWithAllDigestsWhereverAMatchIs) {
  std::vector<Digest> digests;
  for (uint8_t i = 0; i < 10; ++i) digests.push_back(DigestWith(7, i));

  for (uint8_t wanted = 0; wanted < 11; ++wanted) {
    CountedByte::comparisons = 0;
    EXPECT_EQ(FindInConstantTime(digests, DigestWith(7, wanted)), wanted);  // 10: none
    EXPECT_EQ(CountedByte::comparisons, 10 * 32) << int{wanted};
  }
}

TEST_F(ConstantTimeTest, FindsNothingAmongNoDigests) {
  EXPECT_EQ(FindInConstantTime(std::vector<Digest>(), Digest()), 0U);
}

}  // namespace
}  // namespace logprobd
