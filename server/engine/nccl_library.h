#pragma once

#include <nccl.h>

#include "absl/status/statusor.h"

namespace logprobd {

/// The functions of NCCL that the server uses, from the library that is found at run time.
struct NcclLibrary {
  decltype(&ncclGetErrorString) get_error_string = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
};

/// Loads the library at the first call and keeps it loaded. Returns FAILED_PRECONDITION if it
/// cannot be used; the message says what is missing.
absl::StatusOr<const NcclLibrary*> LoadNccl();

}  // namespace logprobd
