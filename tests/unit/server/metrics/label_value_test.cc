#include "server/metrics/label_value.h"

#include <gtest/gtest.h>

#include <string>

namespace logprobd {
namespace {

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

}  // namespace
}  // namespace logprobd
