#include "tests/bench/row_checksum.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace logprobd::testing {
namespace {

std::vector<std::byte> Row() {
  std::vector<std::byte> row(8'192);
  for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<std::byte>(i * 37 + i / 256);
  return row;
}

TEST(RowChecksumTest, ChangesWithEveryByte) {
  std::vector<std::byte> row = Row();
  const float whole = RowChecksum(row);

  size_t unnoticed = 0;
  for (std::byte& byte : row) {
    byte ^= std::byte{1};
    unnoticed += RowChecksum(row) == whole ? 1 : 0;
    byte ^= std::byte{1};
  }

  // The probability that any of 8,192 changes leaves all 24 bits equal is 1 in 2,000.
  EXPECT_EQ(unnoticed, 0U);
}

TEST(RowChecksumTest, ChangesWhenPiecesAreExchanged) {
  std::vector<std::byte> row = Row();
  const float whole = RowChecksum(row);

  std::swap_ranges(row.begin(), row.begin() + 4'096, row.begin() + 4'096);

  EXPECT_NE(RowChecksum(row), whole);
}

TEST(RowChecksumTest, IsAnIntegerThatAFloatCanHold) {
  const float checksum = RowChecksum(Row());

  EXPECT_LE(checksum, 0.0F);
  EXPECT_GT(checksum, -16'777'216.0F);
  EXPECT_EQ(checksum, std::round(checksum));
}

}  // namespace
}  // namespace logprobd::testing
