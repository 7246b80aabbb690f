#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/combine/exchange_mailbox.h"
#include "kernels/common/reduction.h"

namespace logprobd::kernels {

inline constexpr int32_t kExchangeItemsMax = 8;

/// Arrays lie in a slice one after another, each from a multiple of this many bytes on.
inline constexpr int64_t kExchangeAlignment = 16;

/// Bytes of a slice that an array takes.
constexpr int64_t ExchangeBytes(int64_t array_bytes) {
  return (array_bytes + kExchangeAlignment - 1) / kExchangeAlignment * kExchangeAlignment;
}
constexpr int64_t ExchangeBytes(const Reduction& item) {
  return ExchangeBytes(item.count * ReductionBytes(item.type));
}

/// Inputs and outputs of LaunchPeerExchange.
struct PeerExchangeParams {
  PeerGroup group;
  uint64_t epoch = 0;  ///< As PeerStep::epoch.
  /// The arrays, in device memory of the rank, 4-byte aligned at least. Counts and types are the
  /// same on every rank; none at all is a barrier.
  Reduction items[kExchangeItemsMax] = {};
  int32_t num_items = 0;
};

/// Inputs and outputs of LaunchPeerGather.
struct PeerGatherParams {
  PeerGroup group;
  uint64_t epoch = 0;              ///< As PeerExchangeParams::epoch.
  const uint64_t* mine = nullptr;  ///< [count], device memory; may be the rank's place in `all`.
  int64_t count = 0;               ///< The same on every rank; 0 is a barrier.
  /// [num_ranks, all_stride], device memory, of which [num_ranks, count] are written; null: this
  /// rank does not want them.
  uint64_t* all = nullptr;
  int64_t all_stride = 0;  ///< >= count.
};

/// Enqueue on `stream` and return without waiting; results are there when the kernel ends. Every
/// rank launches the same, in the same order, on one stream of its own device (the current one). A
/// launch runs until all ranks have launched it, so nothing may keep them from it: code that is
/// loaded at its first launch can wait for the whole device, so launch or load each kernel once
/// before (ProbePeerExchange for these).
///
/// Thread-safe for different ranks. cudaErrorInvalidValue when a bound is broken or a slice is too
/// small, else the launch's own error.
[[nodiscard]] cudaError_t LaunchPeerExchange(const PeerExchangeParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t LaunchPeerGather(const PeerGatherParams& params, cudaStream_t stream);

/// Loads both kernels on the current device: cudaErrorNoKernelImageForDevice if this build holds
/// none for it.
[[nodiscard]] cudaError_t ProbePeerExchange();

}  // namespace logprobd::kernels
