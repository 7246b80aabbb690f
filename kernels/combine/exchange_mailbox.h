#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

// What GPUs of one process write to each other, in plain C++, so that a plan can be made without a
// GPU.

inline constexpr int32_t kExchangeRanksMax = 16;

/// Most thread blocks of a launch: all must be resident, and while they wait the kernels that fill
/// a multiprocessor find no place beside them.
inline constexpr int32_t kExchangeBlocksMax = 16;

/// Rows that peer_scores.h joins in one launch, and words that a rank tells of a row: each a value
/// of four bytes and the epoch that it belongs to.
inline constexpr int32_t kPeerScoresRowsMax = 256;
inline constexpr int32_t kPeerScoresWords = 16;

// A mailbox: slices [2, num_ranks, slice_bytes], then flags, uint64 [num_ranks,
// kExchangeBlocksMax], then words, uint64 [2, num_ranks, kPeerScoresRowsMax, kPeerScoresWords].
LOGPROBD_HOST_DEVICE constexpr int64_t MailboxFlagsOffset(int32_t num_ranks, int64_t slice_bytes) {
  return 2 * num_ranks * slice_bytes;
}
LOGPROBD_HOST_DEVICE constexpr int64_t MailboxWordsOffset(int32_t num_ranks, int64_t slice_bytes) {
  return MailboxFlagsOffset(num_ranks, slice_bytes) +
         num_ranks * kExchangeBlocksMax * static_cast<int64_t>(sizeof(uint64_t));
}
/// Device memory that a rank's peers write to.
constexpr int64_t MailboxBytes(int32_t num_ranks, int64_t slice_bytes) {
  return MailboxWordsOffset(num_ranks, slice_bytes) + int64_t{2} * num_ranks * kPeerScoresRowsMax *
                                                          kPeerScoresWords *
                                                          static_cast<int64_t>(sizeof(uint64_t));
}

/// GPUs of one process that exchange through each other's memory, as one of them sees it. All state
/// the same `num_ranks` and `slice_bytes`.
struct PeerGroup {
  int32_t rank = 0;
  int32_t num_ranks = 0;  ///< 1 to kExchangeRanksMax.
  /// Of every rank: MailboxBytes, 16-byte aligned, zero before the first launch, and reachable from
  /// this rank's device (cudaDeviceEnablePeerAccess).
  std::byte* mailboxes[kExchangeRanksMax] = {};
  int64_t slice_bytes = 0;  ///< A multiple of kExchangeAlignment; bounds what a launch exchanges.
  /// A word of mapped host memory, or of device memory. Once it is not zero, launches that wait for
  /// a peer end at once and leave anything in their results; the mailboxes then serve no more.
  const uint32_t* abort = nullptr;
};

/// A launch that a rank makes together with its peers. Epochs are 1, 2, 3, ...: one for each launch
/// of peer_exchange.h and peer_scores.h, on every rank the same.
struct PeerStep {
  PeerGroup group;
  uint64_t epoch = 0;
};

}  // namespace logprobd::kernels
