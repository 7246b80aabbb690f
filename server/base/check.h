#pragma once

#include <string>

#include "absl/strings/str_cat.h"

namespace logprobd::internal {

/// Prints the broken invariant and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* expression,
                              const std::string& values);

}  // namespace logprobd::internal

/// Aborts when an invariant of our own is broken; the further arguments (as for absl::StrCat) give
/// the values. Never for input: that is a Status.
#define LOGPROBD_CHECK(condition, ...)                                                \
  do {                                                                                \
    if (!(condition)) {                                                               \
      ::logprobd::internal::CheckFailed(__FILE__, __LINE__, #condition,               \
                                        absl::StrCat("" __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                                 \
  } while (false)
