#include "server/transport/text_check.h"

#include <string>

#include "gtest/gtest.h"

namespace logprobd {
namespace {

TEST(TextCheckTest, FindsControlCharacters) {
  for (const char* text : {"a\nb", "\x1B[31m", "\x7F", "\t", "\xC2\x9B[31m", "\xC2\x80"}) {
    EXPECT_TRUE(HasControlCharacters(text)) << text;
  }
  EXPECT_TRUE(HasControlCharacters(std::string(1, '\0')));
  for (const char* text : {"", "a b", "\xC2\xA0", "\xC3\xA9", "\xE2\x82\xAC"}) {
    EXPECT_FALSE(HasControlCharacters(text)) << text;
  }
}

}  // namespace
}  // namespace logprobd
