#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/engine/collective.h"

namespace logprobd {

/// Whether the library is there: FAILED_PRECONDITION says what is missing.
absl::Status CheckNcclUsable();

/// A Collective by NCCL, which is loaded at run time (libnccl.so.2), so that a server that does not
/// need it runs without. The communicators are non-blocking: no call waits for another rank.
///
/// `gpus` are CUDA ordinals by rank. The current device is changed. FAILED_PRECONDITION when the
/// library or this build's support is missing, INTERNAL when NCCL cannot connect the GPUs.
absl::StatusOr<std::unique_ptr<Collective>> CreateNcclCollective(absl::Span<const int32_t> gpus);

}  // namespace logprobd
