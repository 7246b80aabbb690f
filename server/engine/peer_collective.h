#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/engine/collective.h"

namespace logprobd {

/// A Collective of GPUs that reach each other's memory: each join is one kernel on every GPU
/// (kernels/combine/peer_exchange.h). The current device is changed.
///
/// `gpus` are CUDA ordinals by rank. FAILED_PRECONDITION when a pair cannot reach each other;
/// RESOURCE_EXHAUSTED for memory.
absl::StatusOr<std::unique_ptr<Collective>> CreatePeerCollective(absl::Span<const int32_t> gpus);

/// Lets every GPU reach the memory of the others where it can, so that rows are copied between them
/// without the host. The current device is changed.
absl::Status EnablePeerAccess(absl::Span<const int32_t> gpus);

/// FAILED_PRECONDITION names a pair of GPUs that cannot reach each other's memory.
absl::Status CheckPeerAccess(absl::Span<const int32_t> gpus);

}  // namespace logprobd
