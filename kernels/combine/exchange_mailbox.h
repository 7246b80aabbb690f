#pragma once

#include <cstdint>

namespace logprobd::kernels {

/// Bounds and sizes of what GPUs write to each other (peer_exchange.h), in plain C++, so that a
/// plan can be made without a GPU.
inline constexpr int32_t kExchangeRanksMax = 16;

/// Most thread blocks of a launch: all must be resident, and while they wait the kernels that fill
/// a multiprocessor find no place beside them.
inline constexpr int32_t kExchangeBlocksMax = 16;

/// Device memory that a rank's peers write to: slices [2, num_ranks, slice_bytes], then flags,
/// uint64 [num_ranks, kExchangeBlocksMax].
constexpr int64_t MailboxBytes(int32_t num_ranks, int64_t slice_bytes) {
  return 2 * num_ranks * slice_bytes +
         num_ranks * kExchangeBlocksMax * static_cast<int64_t>(sizeof(uint64_t));
}

}  // namespace logprobd::kernels
