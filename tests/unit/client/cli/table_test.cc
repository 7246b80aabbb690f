#include "client/cli/table.h"

#include <limits>
#include <sstream>

#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

TEST(TableTest, AlignsTheFirstColumnLeftAndTheRestRight) {
  Table table({"head", "rows"});
  table.AddRow({"a", "12"});
  table.AddRow({"longer", "12345"});
  std::ostringstream out;

  table.Print(out);

  EXPECT_EQ(out.str(), "head     rows\na          12\nlonger  12345\n");
}

TEST(TableTest, GroupsDigits) {
  EXPECT_EQ(CountText(0), "0");
  EXPECT_EQ(CountText(999), "999");
  EXPECT_EQ(CountText(1'000), "1,000");
  EXPECT_EQ(CountText(-123'456), "-123,456");
  EXPECT_EQ(CountText(std::numeric_limits<int64_t>::min()), "-9,223,372,036,854,775,808");
}

TEST(TableTest, NamesBytesInBinaryUnits) {
  EXPECT_EQ(BytesText(512), "512 B");
  EXPECT_EQ(BytesText(64 << 20), "64 MiB");
  EXPECT_EQ(BytesText(1'536), "1.5 KiB");
}

TEST(TableTest, GivesShortTimesMoreDigits) {
  EXPECT_EQ(MillisecondsText(0.000213), "0.213");
  EXPECT_EQ(MillisecondsText(0.0123), "12.30");
  EXPECT_EQ(MillisecondsText(4.5678), "4567.8");
}

}  // namespace
}  // namespace logprobd::client
