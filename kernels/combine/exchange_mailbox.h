#pragma once

#include <cstdint>

namespace logprobd::kernels {

/// Bounds and sizes of what GPUs write to each other (peer_exchange.h), in plain C++, so that a
/// plan can be made without a GPU.
inline constexpr int32_t kExchangeRanksMax = 16;

/// Most thread blocks of a launch: few enough that all are resident on any GPU we run on.
inline constexpr int32_t kExchangeBlocksMax = 64;

/// Device memory that a rank's peers write to: slices [2, num_ranks, slice_bytes], then flags,
/// uint64 [num_ranks, kExchangeBlocksMax].
constexpr int64_t MailboxBytes(int32_t num_ranks, int64_t slice_bytes) {
  return 2 * num_ranks * slice_bytes +
         num_ranks * kExchangeBlocksMax * static_cast<int64_t>(sizeof(uint64_t));
}

}  // namespace logprobd::kernels
