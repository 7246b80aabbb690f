#include "server/base/human_bytes.h"

#include <gtest/gtest.h>

namespace logprobd {
namespace {

TEST(HumanBytesTest, ChoosesTheUnit) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(10'239), "10239 B");
  EXPECT_EQ(HumanBytes(10'240), "10.0 KiB");
  EXPECT_EQ(HumanBytes(1 << 20), "1.0 MiB");
  EXPECT_EQ(HumanBytes(int64_t{3} << 29), "1.5 GiB");
}

}  // namespace
}  // namespace logprobd
