#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/host_device.h"

namespace logprobd::kernels {

// Layout of the memory through which the GPUs of one process exchange data. This header is plain
// C++, so that memory can be planned without a GPU.

/// Largest number of GPUs.
inline constexpr int32_t kExchangeRanksMax = 16;

/// Largest number of thread blocks of a launch. All of them must be resident, and while they wait
/// they keep kernels that need a whole multiprocessor from running there.
inline constexpr int32_t kExchangeBlocksMax = 16;

/// Largest number of rows of a peer_scores.h launch.
inline constexpr int32_t kPeerScoresRowsMax = 256;

/// Words that a rank sends per row in such a launch. A word holds four bytes of data and the epoch
/// that they belong to.
inline constexpr int32_t kPeerScoresWords = 16;

// A mailbox consists of slices [2, num_ranks, slice_bytes], then flags, uint64 [num_ranks,
// kExchangeBlocksMax], then words, uint64 [2, num_ranks, kPeerScoresRowsMax, kPeerScoresWords].

/// Returns the byte offset of the flags in a mailbox.
LOGPROBD_HOST_DEVICE constexpr int64_t MailboxFlagsOffset(int32_t num_ranks, int64_t slice_bytes) {
  return 2 * num_ranks * slice_bytes;
}

/// Returns the byte offset of the words in a mailbox.
LOGPROBD_HOST_DEVICE constexpr int64_t MailboxWordsOffset(int32_t num_ranks, int64_t slice_bytes) {
  return MailboxFlagsOffset(num_ranks, slice_bytes) +
         num_ranks * kExchangeBlocksMax * static_cast<int64_t>(sizeof(uint64_t));
}

/// Returns the size in bytes of a mailbox: the device memory of a rank to which its peers write.
constexpr int64_t MailboxBytes(int32_t num_ranks, int64_t slice_bytes) {
  return MailboxWordsOffset(num_ranks, slice_bytes) + int64_t{2} * num_ranks * kPeerScoresRowsMax *
                                                          kPeerScoresWords *
                                                          static_cast<int64_t>(sizeof(uint64_t));
}

/// The GPUs of one process that exchange data through each other's memory, described from the
/// perspective of one rank. All ranks must pass the same `num_ranks` and `slice_bytes`.
struct PeerGroup {
  int32_t rank = 0;
  int32_t num_ranks = 0;  ///< 1 to kExchangeRanksMax.
  /// Mailbox of every rank: MailboxBytes of device memory, 16-byte aligned, zero before the first
  /// launch, and accessible from this rank's device (cudaDeviceEnablePeerAccess).
  std::byte* mailboxes[kExchangeRanksMax] = {};
  /// Maximum number of bytes that a launch exchanges, a multiple of kExchangeAlignment.
  int64_t slice_bytes = 0;
  /// A word of mapped host memory or of device memory. Once it is not zero, launches that wait for
  /// a peer end early with unspecified results, and the mailboxes must not be used again.
  const uint32_t* abort = nullptr;
};

/// One launch of peer_exchange.h or peer_scores.h, which all ranks make together. Epochs number
/// these launches 1, 2, 3, ...; every rank uses the same epoch for the same launch.
struct PeerStep {
  PeerGroup group;
  uint64_t epoch = 0;
};

}  // namespace logprobd::kernels
