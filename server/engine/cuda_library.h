#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// Opens a library of CUDA that the program is not linked with, so that it starts without it, and
/// keeps it open. `file_name` is searched in the program's run path, which a wheel and a build from
/// source set, in LD_LIBRARY_PATH and in the system's folders. Returns FAILED_PRECONDITION if it
/// cannot be opened; the message has `library`, its name for readers, and says what to install, in
/// a wheel and from `package`, a Debian package of NVIDIA's repository.
absl::StatusOr<void*> OpenCudaLibrary(const char* file_name, absl::string_view library,
                                      absl::string_view package);

}  // namespace logprobd
