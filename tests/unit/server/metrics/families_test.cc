#include "server/metrics/families.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;

TEST(LabelValueTest, KeepsPlainAndUtf8Text) {
  EXPECT_EQ(LabelValue("Qwen3-0.6B"), "Qwen3-0.6B");
  EXPECT_EQ(LabelValue("a\"b\\c"), "a\"b\\c");  // The serializer escapes these.
  EXPECT_EQ(LabelValue("modèle 模型 \xF0\x9F\x98\x80"), "modèle 模型 \xF0\x9F\x98\x80");
}

TEST(LabelValueTest, ReplacesControlCharacters) {
  EXPECT_EQ(LabelValue("a\nb\tc\x7F"), "a_b_c_");
  EXPECT_EQ(LabelValue(std::string("a\0b", 3)), "a_b");
  EXPECT_EQ(LabelValue("a\xC2\x9B\xE2\x80\xA8z"), "a__z");
}

TEST(LabelValueTest, ReplacesBytesThatAreNotUtf8) {
  EXPECT_EQ(LabelValue("\xFFz"), "_z");
  EXPECT_EQ(LabelValue("\xC0\x80"), "__");            // Overlong.
  EXPECT_EQ(LabelValue("\xED\xA0\x80"), "___");       // A surrogate.
  EXPECT_EQ(LabelValue("\xF4\x90\x80\x80"), "____");  // Beyond U+10FFFF.
  EXPECT_EQ(LabelValue("a\xE4\xBD"), "a__");          // Truncated.
}

TEST(LabelValueTest, CutsLongTextBetweenCharacters) {
  EXPECT_EQ(LabelValue(std::string(1000, 'a')), std::string(128, 'a'));
  EXPECT_EQ(LabelValue(std::string(127, 'a') + "é"), std::string(127, 'a'));
}

TEST(BucketsTest, KeepTheirFactorAndRange) {
  const std::vector<double> durations = DurationBuckets();

  EXPECT_THAT(std::vector<double>(durations.begin(), durations.begin() + 4),
              ElementsAre(5e-05, 7.5e-05, 0.0001125, 0.00016875));
  EXPECT_EQ(durations.size(), 34U);
  EXPECT_NEAR(durations.back(), 50e-6 * std::pow(1.5, 33), 1e-9);
  EXPECT_EQ(LoadBuckets().back(), 1'638.4);
  EXPECT_EQ(CountBuckets().back(), 1'048'576);
}

TEST(BucketsTest, AreDecimalNumbersOf12Digits) {
  for (const std::vector<double>& bounds : {DurationBuckets(), LoadBuckets(), CountBuckets()}) {
    for (const double bound : bounds) {
      double printed = 0;
      ASSERT_TRUE(absl::SimpleAtod(absl::StrFormat("%.12g", bound), &printed));
      EXPECT_EQ(printed, bound);
    }
  }
}

}  // namespace
}  // namespace logprobd
