// The few functions of newer C and C++ libraries that the archives of this prefix use, for the
// older ones of Debian 12 and of manylinux_2_35: the archives were compiled with glibc 2.43 and
// GCC 16.

#include <cxxabi.h>
#include <sys/random.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>  // initializes std::cout and the other streams before main, as ios_base_library_init() should
#include <string>

extern "C" {

// glibc 2.38: also read binary numbers such as 0b11, where the base is 0 or 2. The archives parse
// none.
long __isoc23_strtol(const char* text, char** end, int base) { return strtol(text, end, base); }
long long __isoc23_strtoll(const char* text, char** end, int base) {
  return strtoll(text, end, base);
}
unsigned long __isoc23_strtoul(const char* text, char** end, int base) {
  return strtoul(text, end, base);
}
unsigned long long __isoc23_strtoull(const char* text, char** end, int base) {
  return strtoull(text, end, base);
}
int __isoc23_sscanf(const char* text, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int count = vsscanf(text, format, arguments);
  va_end(arguments);
  return count;
}

// glibc 2.36. c-ares draws the numbers of its queries with it.
void arc4random_buf(void* buffer, size_t size) {
  char* next = static_cast<char*>(buffer);
  while (size > 0) {
    const ssize_t drawn = getrandom(next, size, 0);
    if (drawn < 0) {
      if (errno == EINTR) continue;
      abort();  // without random numbers its callers would be guessable
    }
    next += drawn;
    size -= static_cast<size_t>(drawn);
  }
}

// libstdc++ 14: an exception leaves a function that is noexcept.
void __cxa_call_terminate(void* exception) {
  if (exception != nullptr) abi::__cxa_begin_catch(exception);
  std::terminate();
}

}  // extern "C"

namespace logprobd {

// libstdc++ 13: std::string::_M_replace_cold, which replaces `old_size` characters at `at` by
// `text`, which may lie in the string itself. `rest` is the number of characters behind them. The
// string has the capacity.
void ReplaceInPlace(void* string, char* at, size_t old_size, const char* text, size_t size, size_t rest) __asm__(
    "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE"
    "15_M_replace_coldEPcmPKcmm");
void ReplaceInPlace(void* /*string*/, char* at, size_t old_size, const char* text, size_t size,
                    size_t rest) {
  const std::string copy(text, size);
  if (rest > 0 && old_size != size) memmove(at + size, at + old_size, rest);
  memcpy(at, copy.data(), size);
}

}  // namespace logprobd

namespace std {

// libstdc++ 13: files that include <iostream> name this function, so that the streams are linked.
void ios_base_library_init() {}

}  // namespace std
