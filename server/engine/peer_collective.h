#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/engine/collective.h"

namespace logprobd {

/// Creates a Collective of GPUs that can access each other's memory. A call launches kernels on
/// every GPU, one for each slice of data (kernels/combine/peer_exchange.h). Changes the current
/// device.
///
/// `gpus` are CUDA ordinals by rank. Returns FAILED_PRECONDITION if a GPU cannot access the memory
/// of another one, and RESOURCE_EXHAUSTED if memory runs out.
absl::StatusOr<std::unique_ptr<Collective>> CreatePeerCollective(absl::Span<const int32_t> gpus);

/// Enables access of every GPU to the memory of the others where possible, so that rows are copied
/// between them without the host. Changes the current device.
absl::Status EnablePeerAccess(absl::Span<const int32_t> gpus);

/// Returns FAILED_PRECONDITION if a GPU cannot access the memory of another one; the message names
/// both.
absl::Status CheckPeerAccess(absl::Span<const int32_t> gpus);

}  // namespace logprobd
