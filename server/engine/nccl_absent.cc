// Stands in for NCCL in a build without its header.

#include "server/engine/nccl_collective.h"

namespace logprobd {

absl::Status CheckNcclUsable() {
  return absl::FailedPreconditionError(
      "this build has no NCCL: install libnccl-dev and build again, or use GPUs that reach each "
      "other's memory");
}

absl::StatusOr<std::unique_ptr<Collective>> CreateNcclCollective(
    absl::Span<const int32_t> /*gpus*/) {
  return CheckNcclUsable();
}

}  // namespace logprobd
