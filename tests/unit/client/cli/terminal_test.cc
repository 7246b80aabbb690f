#include "client/cli/terminal.h"

#include <limits>
#include <sstream>
#include <string>

#include "absl/synchronization/notification.h"
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

TEST(NumberTextTest, GroupsDigits) {
  EXPECT_EQ(CountText(0), "0");
  EXPECT_EQ(CountText(999), "999");
  EXPECT_EQ(CountText(1'000), "1,000");
  EXPECT_EQ(CountText(-123'456), "-123,456");
  EXPECT_EQ(CountText(std::numeric_limits<int64_t>::min()), "-9,223,372,036,854,775,808");
}

TEST(NumberTextTest, PrintsBytesInBinaryUnits) {
  EXPECT_EQ(BytesText(512), "512 B");
  EXPECT_EQ(BytesText(64 << 20), "64 MiB");
  EXPECT_EQ(BytesText(1'536), "1.5 KiB");
}

TEST(NumberTextTest, GivesShortTimesMoreDigits) {
  EXPECT_EQ(MillisecondsText(0.000213), "0.213");
  EXPECT_EQ(MillisecondsText(0.0123), "12.30");
  EXPECT_EQ(MillisecondsText(4.5678), "4567.8");
}

TEST(ProgressLineTest, ReplacesAndRemovesItsLineOnATerminal) {
  std::ostringstream out;
  {
    ProgressLine line(out, /*is_terminal=*/true);
    line.Update("loading");
    EXPECT_EQ(out.str(), "\rloading");
    line.Clear();
    EXPECT_EQ(out.str(), "\rloading\r       \r");
    line.Clear();
  }
  EXPECT_EQ(out.str(), "\rloading\r       \r");
}

TEST(ProgressLineTest, IsRemovedAtItsEnd) {
  std::ostringstream out;
  {
    ProgressLine line(out, /*is_terminal=*/true);
    line.Update("ab");
  }
  EXPECT_EQ(out.str(), "\rab\r  \r");
}

TEST(ProgressLineTest, WritesNothingToAFile) {
  std::ostringstream out;
  {
    ProgressLine line(out, /*is_terminal=*/false);
    line.Update("loading");
  }
  EXPECT_EQ(out.str(), "");
}

TEST(DelayedNoticeTest, PrintsAfterItsDelay) {
  absl::Notification printed;
  struct Signal : std::stringbuf {
    explicit Signal(absl::Notification& done) : printed(done) {}
    int sync() override {
      printed.Notify();
      return 0;
    }
    absl::Notification& printed;
  } buffer(printed);
  std::ostream out(&buffer);

  const DelayedNotice notice(out, "waiting", absl::ZeroDuration());
  printed.WaitForNotification();

  EXPECT_EQ(buffer.str(), "waiting\n");
}

TEST(DelayedNoticeTest, PrintsNothingIfItEndsBeforeItsDelay) {
  std::ostringstream out;

  { const DelayedNotice notice(out, "waiting", absl::InfiniteDuration()); }

  EXPECT_EQ(out.str(), "");
}

}  // namespace
}  // namespace logprobd::client
