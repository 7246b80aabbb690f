#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/engine/collective.h"

namespace logprobd {

/// Returns FAILED_PRECONDITION if NCCL cannot be used; the message says what is missing.
absl::Status CheckNcclUsable();

/// Creates a Collective that uses NCCL. The library (libnccl.so.2) is loaded at run time, so that
/// servers that do not need it run without it. The communicators are non-blocking: no call waits
/// for another rank.
///
/// `gpus` are CUDA ordinals by rank. Changes the current device. Returns FAILED_PRECONDITION if the
/// library is missing or this build has no NCCL support, and INTERNAL if NCCL cannot connect the
/// GPUs.
absl::StatusOr<std::unique_ptr<Collective>> CreateNcclCollective(absl::Span<const int32_t> gpus);

}  // namespace logprobd
