#include "server/http/html_text.h"

#include <gtest/gtest.h>

namespace logprobd {
namespace {

TEST(HtmlTextTest, EscapesWhatHtmlWouldTakeForItsOwn) {
  EXPECT_EQ(EscapeHtml(R"(<a b="c" d='e'>&amp;)"),
            "&lt;a b=&quot;c&quot; d=&#39;e&#39;&gt;&amp;amp;");
  EXPECT_EQ(EscapeHtml("modèle 模型"), "modèle 模型");
}

TEST(HtmlTextTest, GivesDurationsThreeDigitsInAFittingUnit) {
  EXPECT_EQ(HumanSeconds(0), "0");
  EXPECT_EQ(HumanSeconds(28.54e-6), "28.5 µs");
  EXPECT_EQ(HumanSeconds(999.9e-6), "1 ms");
  EXPECT_EQ(HumanSeconds(0.0123), "12.3 ms");
  EXPECT_EQ(HumanSeconds(0.9999), "1 s");
  EXPECT_EQ(HumanSeconds(59.4), "59.4 s");
  EXPECT_EQ(HumanSeconds(200), "3 min 20 s");
  EXPECT_EQ(HumanSeconds(7'500), "2 h 5 min");
  EXPECT_EQ(HumanSeconds(273'600), "3 d 4 h");
}

TEST(HtmlTextTest, GroupsLargeNumbersAndShortensHugeOnes) {
  EXPECT_EQ(HumanNumber(0), "0");
  EXPECT_EQ(HumanNumber(0.25), "0.25");
  EXPECT_EQ(HumanNumber(7.54), "7.5");
  EXPECT_EQ(HumanNumber(10), "10");
  EXPECT_EQ(HumanNumber(999.6), "1,000");
  EXPECT_EQ(HumanNumber(123'456), "123,456");
  EXPECT_EQ(HumanNumber(1'250'000), "1.25 M");
  EXPECT_EQ(HumanNumber(3.1e9), "3.10 G");
}

TEST(HtmlTextTest, GivesSmallSharesADigitMore) {
  EXPECT_EQ(HumanShare(0), "0%");
  EXPECT_EQ(HumanShare(0.0081), "0.8%");
  EXPECT_EQ(HumanShare(0.42), "42%");
  EXPECT_EQ(HumanShare(1), "100%");
}

}  // namespace
}  // namespace logprobd
