#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/engine/collective.h"

namespace logprobd {

/// Creates a Collective of GPUs that reach each other's memory: each call is one kernel on every
/// GPU (kernels/combine/peer_exchange.h). Changes the current device.
///
/// `gpus` are CUDA ordinals by rank. FAILED_PRECONDITION if a pair of GPUs cannot reach each other,
/// RESOURCE_EXHAUSTED for memory.
absl::StatusOr<std::unique_ptr<Collective>> CreatePeerCollective(absl::Span<const int32_t> gpus);

/// Gives every GPU access to the memory of the others where possible, so that rows are copied
/// between them without the host. Changes the current device.
absl::Status EnablePeerAccess(absl::Span<const int32_t> gpus);

/// FAILED_PRECONDITION if some GPU cannot reach the memory of another one; the message names both.
absl::Status CheckPeerAccess(absl::Span<const int32_t> gpus);

}  // namespace logprobd
