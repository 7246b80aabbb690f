#pragma once

#include <string>

namespace logprobd {

/// Version and commit of this build.
struct BuildInfo {
  std::string version;
  std::string commit;
};
BuildInfo Build();

}  // namespace logprobd
