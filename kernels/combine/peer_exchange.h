#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/combine/exchange_mailbox.h"
#include "kernels/common/reduction.h"

namespace logprobd::kernels {

/// Largest number of arrays that one LaunchPeerExchange reduces.
inline constexpr int32_t kExchangeItemsMax = 8;

/// Arrays are stored in a slice one after another; each starts at a multiple of this many bytes.
inline constexpr int64_t kExchangeAlignment = 16;

/// Returns the number of bytes of a slice that an array occupies.
constexpr int64_t ExchangeBytes(int64_t array_bytes) {
  return (array_bytes + kExchangeAlignment - 1) / kExchangeAlignment * kExchangeAlignment;
}
constexpr int64_t ExchangeBytes(const Reduction& item) {
  return ExchangeBytes(item.count * ReductionBytes(item.type));
}

/// Inputs and outputs of LaunchPeerExchange.
struct PeerExchangeParams {
  PeerGroup group;
  uint64_t epoch = 0;  ///< See PeerStep.
  /// Arrays to reduce, in this rank's device memory, at least 4-byte aligned. Counts and types must
  /// be the same on every rank.
  Reduction items[kExchangeItemsMax] = {};
  int32_t num_items = 0;  ///< 0 makes the launch a barrier.
};

/// Inputs and outputs of LaunchPeerGather.
struct PeerGatherParams {
  PeerGroup group;
  uint64_t epoch = 0;              ///< See PeerStep.
  const uint64_t* mine = nullptr;  ///< [count], device memory; may be the rank's own part of `all`.
  int64_t count = 0;               ///< The same on every rank; 0 makes the launch a barrier.
  /// [num_ranks, all_stride], device memory; [num_ranks, count] of it is written. Null if this
  /// rank does not need the result.
  uint64_t* all = nullptr;
  int64_t all_stride = 0;  ///< >= count.
};

// The launches below enqueue on `stream` and return without waiting; results are valid when the
// kernel ends. Every rank must make the same launches in the same order on one stream of its own
// device, which must be the current device. A kernel runs until all ranks have launched it, so a
// caller must not wait for one launch before it makes the others. Loading a kernel at its first
// launch can wait for the whole device, so load each kernel beforehand (ProbePeerExchange). Both
// functions may be called concurrently for different ranks. They return cudaErrorInvalidValue if a
// parameter is out of range or a slice is too small, otherwise the error of the launch.

/// Reduces each array over all ranks; every rank gets the result in place.
[[nodiscard]] cudaError_t LaunchPeerExchange(const PeerExchangeParams& params, cudaStream_t stream);

/// Collects one array of every rank.
[[nodiscard]] cudaError_t LaunchPeerGather(const PeerGatherParams& params, cudaStream_t stream);

/// Loads both kernels on the current device. Returns cudaErrorNoKernelImageForDevice if this build
/// has no code for that device.
[[nodiscard]] cudaError_t ProbePeerExchange();

}  // namespace logprobd::kernels
