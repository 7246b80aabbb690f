#include "server/metrics/families.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;

TEST(LabelValueTest, KeepsPlainAndUtf8Text) {
  EXPECT_EQ(LabelValue("Qwen3-0.6B"), "Qwen3-0.6B");
  EXPECT_EQ(LabelValue("a\"b\\c"), "a\"b\\c");  // the serialiser escapes these
  EXPECT_EQ(LabelValue("modèle 模型 \xF0\x9F\x98\x80"), "modèle 模型 \xF0\x9F\x98\x80");
}

TEST(LabelValueTest, ReplacesControlCharacters) {
  EXPECT_EQ(LabelValue("a\nb\tc\x7F"), "a_b_c_");
  EXPECT_EQ(LabelValue(std::string("a\0b", 3)), "a_b");
}

TEST(LabelValueTest, ReplacesBytesThatAreNotUtf8) {
  EXPECT_EQ(LabelValue("\xFFz"), "_z");
  EXPECT_EQ(LabelValue("\xC0\x80"), "__");            // overlong
  EXPECT_EQ(LabelValue("\xED\xA0\x80"), "___");       // surrogate
  EXPECT_EQ(LabelValue("\xF4\x90\x80\x80"), "____");  // beyond U+10FFFF
  EXPECT_EQ(LabelValue("a\xE4\xBD"), "a__");          // cut short
}

TEST(LabelValueTest, CutsLongTextBetweenCharacters) {
  EXPECT_EQ(LabelValue(std::string(1000, 'a')), std::string(128, 'a'));
  EXPECT_EQ(LabelValue(std::string(127, 'a') + "é"), std::string(127, 'a'));
}

/// The bounds as the text format prints them: with 16 significant digits.
std::vector<std::string> Printed(const std::vector<double>& bounds) {
  std::vector<std::string> texts;
  for (const double bound : bounds) {
    texts.push_back(absl::StrFormat("%.16g", bound));
  }
  return texts;
}

TEST(BucketsTest, PrintTheirBoundsWithoutRoundingErrors) {
  for (const std::vector<double>& bounds : {DurationBuckets(), LoadBuckets(), CountBuckets()}) {
    for (const std::string& text : Printed(bounds)) {
      const std::string digits = text.substr(0, text.find('e'));
      const size_t num_digits = absl::StrReplaceAll(digits, {{".", ""}}).size();
      EXPECT_LE(num_digits - digits.find_first_not_of("0."), 13U) << text;
    }
  }
}

TEST(BucketsTest, KeepTheirFactorAndRange) {
  const std::vector<std::string> durations = Printed(DurationBuckets());

  EXPECT_THAT(std::vector<std::string>(durations.begin(), durations.begin() + 4),
              ElementsAre("5e-05", "7.5e-05", "0.0001125", "0.00016875"));
  EXPECT_EQ(durations.size(), 34U);
  EXPECT_NEAR(DurationBuckets().back(), 50e-6 * std::pow(1.5, 33), 1e-9);
  EXPECT_EQ(Printed(LoadBuckets()).back(), "1638.4");
  EXPECT_EQ(Printed(CountBuckets()).back(), "1048576");
}

}  // namespace
}  // namespace logprobd
