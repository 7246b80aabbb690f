#pragma once

#include <string>

namespace logprobd {

/// Version and commit of this build.
struct BuildFacts {
  std::string version;
  std::string commit;
};
BuildFacts Build();

}  // namespace logprobd
