#include "server/base/text.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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

std::string Encoded(uint32_t code) {
  const auto byte = [](uint32_t bits) { return static_cast<char>(bits); };
  const auto tail = [&](int shift, uint32_t value) {
    return byte(0x80U | (value >> shift & 0x3FU));
  };
  if (code < 0x80) return {byte(code)};
  if (code < 0x800) return {byte(0xC0U | code >> 6), tail(0, code)};
  if (code < 0x10000) return {byte(0xE0U | code >> 12), tail(6, code), tail(0, code)};
  return {byte(0xF0U | code >> 18), tail(12, code), tail(6, code), tail(0, code)};
}

TEST(OneLineTest, EscapesTheCharactersThatEndALineOrChangeHowTextIsShownAndNoOthers) {
  const auto is_unsafe = [](uint32_t code) {
    return code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x61C || code == 0x200E ||
           code == 0x200F || (code >= 0x2028 && code <= 0x202E) ||
           (code >= 0x2066 && code <= 0x2069);
  };
  for (uint32_t code = 0; code <= 0x10FFFF; ++code) {
    if (code >= 0xD800 && code <= 0xDFFF) continue;  // surrogates are no characters
    const std::string text = Encoded(code);
    const std::string shown =
        is_unsafe(code) ? absl::StrFormat("a\\u%04xb", code) : absl::StrCat("a", text, "b");
    ASSERT_EQ(OneLine(absl::StrCat("a", text, "b"), 100), shown) << code;
    ASSERT_EQ(IsUnsafeToShow(text), is_unsafe(code)) << code;
  }
}

TEST(OneLineTest, ReplacesBytesThatAreNoCharacter) {
  EXPECT_EQ(OneLine("a\x9B\xE2\x80", 100), "a\\ufffd\\ufffd\\ufffd");
}

TEST(OneLineTest, PutsABackslashBeforeOtherCharactersIfAsked) {
  EXPECT_EQ(OneLine("\"a\\", 100), "\"a\\");
  EXPECT_EQ(OneLine("\"a\\", 100, "\"\\"), "\\\"a\\\\");
}

TEST(OneLineTest, CutsBetweenCharactersAndEscapesAndStatesTheSize) {
  EXPECT_EQ(OneLine("abc", 3), "abc");
  EXPECT_EQ(OneLine("abcd", 3), "abc...(4 bytes)");
  EXPECT_EQ(OneLine("ab\xE2\x82\xAC", 4), "ab...(5 bytes)");
  EXPECT_EQ(OneLine("\n\n", 11), "\\u000a...(2 bytes)");
  EXPECT_EQ(OneLine("a", 0), "...(1 bytes)");
  EXPECT_EQ(OneLine("", 0), "");
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
