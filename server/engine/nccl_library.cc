#include "server/engine/nccl_library.h"

#include <dlfcn.h>

#include "absl/status/status.h"
#include "server/base/errors.h"
#include "server/engine/cuda_library.h"

namespace logprobd {
namespace {

template <typename Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

absl::StatusOr<NcclLibrary> Load() {
  LOGPROBD_ASSIGN_OR_RETURN(void* const library,
                            OpenCudaLibrary("libnccl.so.2", "NCCL", "libnccl2"));
  NcclLibrary nccl;
  const bool has_all = Find(library, "ncclGetErrorString", nccl.get_error_string) &&
                       Find(library, "ncclGetUniqueId", nccl.get_unique_id) &&
                       Find(library, "ncclCommInitRankConfig", nccl.comm_init_rank_config) &&
                       Find(library, "ncclCommGetAsyncError", nccl.comm_get_async_error) &&
                       Find(library, "ncclCommAbort", nccl.comm_abort) &&
                       Find(library, "ncclGroupStart", nccl.group_start) &&
                       Find(library, "ncclGroupEnd", nccl.group_end) &&
                       Find(library, "ncclAllReduce", nccl.all_reduce) &&
                       Find(library, "ncclSend", nccl.send) && Find(library, "ncclRecv", nccl.recv);
  if (!has_all) {
    return absl::FailedPreconditionError("libnccl.so.2 is too old: install NCCL 2.14 or later");
  }
  return nccl;
}

}  // namespace

absl::StatusOr<const NcclLibrary*> LoadNccl() {
  static const auto* const library = new absl::StatusOr<NcclLibrary>(Load());
  if (!library->ok()) return library->status();
  return &**library;
}

}  // namespace logprobd
