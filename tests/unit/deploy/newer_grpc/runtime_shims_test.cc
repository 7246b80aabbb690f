#include <array>
#include <cstddef>
#include <set>
#include <string>

#include "gtest/gtest.h"

// The functions have no header; programs reach them by the names that the compiler uses.
extern "C" {
long __isoc23_strtol(const char* text, char** end, int base);
unsigned long long __isoc23_strtoull(const char* text, char** end, int base);
int __isoc23_sscanf(const char* text, const char* format, ...);
void arc4random_buf(void* buffer, size_t size);
void __cxa_call_terminate(void* exception);
}

namespace logprobd {

void ReplaceInPlace(void* string, char* at, size_t old_size, const char* text, size_t size, size_t rest) __asm__(
    "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE"
    "15_M_replace_coldEPcmPKcmm");

namespace {

/// Replaces `old_size` characters at `begin` by `size` characters of the string itself from `from`.
std::string ReplacedByItself(std::string text, size_t begin, size_t old_size, size_t from,
                             size_t size) {
  const size_t rest = text.size() - begin - old_size, new_size = text.size() - old_size + size;
  text.resize(64);
  ReplaceInPlace(&text, text.data() + begin, old_size, text.data() + from, size, rest);
  text.resize(new_size);
  return text;
}

TEST(RuntimeShimsTest, ReplacesPartsOfAStringByOthersOfIt) {
  const std::string text = "abcdefghij";

  for (size_t begin = 0; begin <= text.size(); ++begin) {
    for (size_t old_size = 0; begin + old_size <= text.size(); ++old_size) {
      for (size_t from = 0; from <= text.size(); ++from) {
        for (size_t size = 0; from + size <= text.size(); ++size) {
          std::string expected = text;
          expected.replace(begin, old_size, text.substr(from, size));
          ASSERT_EQ(ReplacedByItself(text, begin, old_size, from, size), expected);
        }
      }
    }
  }
}

TEST(RuntimeShimsTest, ReadsNumbers) {
  char* end = nullptr;
  int first = 0, second = 0;

  EXPECT_EQ(__isoc23_strtol("-0x1f,", &end, 0), -31);
  EXPECT_EQ(*end, ',');
  EXPECT_EQ(__isoc23_strtoull("18446744073709551615", nullptr, 10), ~0ULL);
  EXPECT_EQ(__isoc23_sscanf("3 of 14", "%d of %d", &first, &second), 2);
  EXPECT_EQ(first, 3);
  EXPECT_EQ(second, 14);
}

TEST(RuntimeShimsTest, FillsTheWholeBufferWithRandomBytes) {
  constexpr size_t kBytes = 4096, kGuard = 8;
  std::array<unsigned char, kBytes + kGuard> buffer = {};

  arc4random_buf(buffer.data(), kBytes);

  const std::set<unsigned char> values(buffer.begin(), buffer.begin() + kBytes);
  EXPECT_GT(values.size(), 200U);  // of 256; fewer have a probability below 1e-100
  EXPECT_EQ(std::set<unsigned char>(buffer.end() - kGuard, buffer.end()),
            std::set<unsigned char>{0});
}

TEST(RuntimeShimsDeathTest, EndsTheProcessWhenAnExceptionLeavesAFunctionThatIsNoexcept) {
  EXPECT_DEATH(__cxa_call_terminate(nullptr), "terminate called");
}

}  // namespace
}  // namespace logprobd
