#include "server/engine/cuda_library.h"

#include <dlfcn.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace logprobd {

absl::StatusOr<void*> OpenCudaLibrary(const char* file_name, absl::string_view library,
                                      absl::string_view package) {
  void* const handle = dlopen(file_name, RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) return handle;
  return absl::FailedPreconditionError(
      absl::StrCat(library, " cannot be loaded (", dlerror(),
                   "): run pip install 'logprobd-server[cuda]', install ", package,
                   ", or add the folder of ", file_name, " to LD_LIBRARY_PATH"));
}

}  // namespace logprobd
