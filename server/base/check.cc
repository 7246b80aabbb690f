#include "server/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace logprobd::internal {

void CheckFailed(const char* file, int line, const char* expression, const std::string& values) {
  std::fprintf(stderr, "%s:%d: broken invariant: %s%s%s\n", file, line, expression,
               values.empty() ? "" : ": ", values.c_str());
  std::abort();
}

}  // namespace logprobd::internal
