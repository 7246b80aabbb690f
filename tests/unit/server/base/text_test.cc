#include "server/base/text.h"

#include <gtest/gtest.h>

#include <string>

#include "gtest/gtest.h"

namespace logprobd {
namespace {

TEST(Utf8Test, AcceptsSequencesOfEveryLength) {
  for (const char* text : {"", "plain", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80",
                           "\xED\x9F\xBF", "\xEE\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_TRUE(IsUtf8(text)) << text;
  }
}

TEST(Utf8Test, RejectsMalformedSequences) {
  for (const char* text : {"\x80", "\xFF", "\xC3", "a\xC3", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF",
                           "\xE2\x82", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80",
                           "\xF5\x80\x80\x80", "\xE2\x28\xA1", "\xF0\x9F\x98"}) {
    EXPECT_FALSE(IsUtf8(text)) << text;
  }
}

TEST(Utf8Test, CutsBeforeACharacterThatDoesNotFit) {
  EXPECT_EQ(CutUtf8("abc", 3), "abc");
  EXPECT_EQ(CutUtf8("abc", 2), "ab");
  EXPECT_EQ(CutUtf8("a\xE2\x82\xAC", 3), "a");
  EXPECT_EQ(CutUtf8("a\xE2\x82\xAC"
                    "b",
                    4),
            "a\xE2\x82\xAC");
  EXPECT_EQ(CutUtf8("\xE2\x82\xAC", 0), "");
}

TEST(Utf8Test, ReplacesEachByteOutsideACharacter) {
  EXPECT_EQ(ToUtf8("a\xE2\x82\xAC"), "a\xE2\x82\xAC");
  EXPECT_EQ(ToUtf8("a\xE2\x82"), "a??");
  EXPECT_EQ(ToUtf8("\xFF"
                   "b"),
            "?b");
}

TEST(TextCheckTest, FindsControlCharacters) {
  for (const char* text : {"a\nb", "\x1B[31m", "\x7F", "\t", "\xC2\x9B[31m", "\xC2\x80"}) {
    EXPECT_TRUE(HasControlCharacters(text)) << text;
  }
  EXPECT_TRUE(HasControlCharacters(std::string(1, '\0')));
  for (const char* text : {"", "a b", "\xC2\xA0", "\xC3\xA9", "\xE2\x82\xAC"}) {
    EXPECT_FALSE(HasControlCharacters(text)) << text;
  }
}

TEST(HumanBytesTest, ChoosesTheUnit) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(10'239), "10239 B");
  EXPECT_EQ(HumanBytes(10'240), "10.0 KiB");
  EXPECT_EQ(HumanBytes(1 << 20), "1.0 MiB");
  EXPECT_EQ(HumanBytes(int64_t{3} << 29), "1.5 GiB");
}

}  // namespace

}  // namespace logprobd
