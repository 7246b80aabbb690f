// PeerExchangeKernel, PeerGatherKernel: reduce or collect arrays over the GPUs of one process.
//
// Idea      Push: every rank writes its arrays to its slice of every other rank's mailbox, then sets
//           a flag there to the epoch. Wait: every rank waits until the flags of all other ranks
//           have arrived in its own mailbox. Combine: every rank reads the slices from local
//           memory. Data crosses the link once, without a collective library.
//           There are two sets of slices, for odd and even epochs, so a rank need not wait for the
//           readers of its slice. A rank pushes epoch e + 2, into the slices of e, only after its
//           kernel of e + 1 has ended. That kernel has seen every rank's flags of e + 1, and a rank
//           sets those only in its kernel of e + 1, after its kernel of e with all its reads has
//           ended. Flags only increase, so a flag that is one epoch ahead also satisfies the wait.
//           If e + 1 is a launch of peer_scores, its words give the same guarantee as the flags.
// Work      Arrays are processed in packets of 16 bytes. Block b has the same packets on every
//           rank and has its own flag: it waits only for block b of the other ranks. Each thread
//           has one packet until there are kExchangeBlocksMax blocks.
// Traffic   Sends and receives (num_ranks - 1) times the arrays over the link; reads the arrays
//           twice from local memory.
// Numerics  Results are integers, exact and the same on every rank.
// Limits    kExchangeRanksMax ranks, kExchangeItemsMax arrays, one slice. The kernel waits for a
//           missing rank until `abort` is set.
// Source    Our own. The flags follow the PTX memory model: a release at system scope after a barrier
//           covers the writes of the block, an acquire before a barrier covers its reads.

#include <algorithm>
#include <cstdint>

#include "kernels/combine/peer_exchange.h"

namespace logprobd::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kPacketBytes = static_cast<int>(kExchangeAlignment);
constexpr int kPacketWords = kPacketBytes / 4;
constexpr int kPollsPerAbortCheck = 256;  // the abort word may be in host memory
constexpr unsigned kPollSleepNs = 20;

static_assert(kThreads >= kExchangeRanksMax);

/// 16 bytes of an array: four elements of 4 bytes or two of 8 bytes.
struct Packet {
  uint32_t words[kPacketWords];
};

/// An array, viewed as 4-byte words.
struct Words {
  uint32_t* data;
  int64_t count;
};

__device__ __forceinline__ bool IsWhole(const Words& array, int64_t packet) {
  return (packet + 1) * kPacketWords <= array.count &&
         reinterpret_cast<uintptr_t>(array.data) % kPacketBytes == 0;
}

/// Loads a packet; words beyond the end of the array are set to zero.
__device__ __forceinline__ Packet LoadPacket(const Words& array, int64_t packet) {
  const uint32_t* const from = array.data + packet * kPacketWords;
  if (IsWhole(array, packet)) {
    const uint4 value = *reinterpret_cast<const uint4*>(from);
    return {{value.x, value.y, value.z, value.w}};
  }
  Packet value = {};
#pragma unroll
  for (int i = 0; i < kPacketWords; ++i) {
    if (packet * kPacketWords + i < array.count) value.words[i] = from[i];
  }
  return value;
}

__device__ __forceinline__ void StorePacket(const Words& array, int64_t packet,
                                            const Packet& value) {
  uint32_t* const to = array.data + packet * kPacketWords;
  if (IsWhole(array, packet)) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPacketWords; ++i) {
    if (packet * kPacketWords + i < array.count) to[i] = value.words[i];
  }
}

__device__ __forceinline__ uint64_t LongWord(const Packet& packet, int index) {
  return static_cast<uint64_t>(packet.words[2 * index + 1]) << 32 | packet.words[2 * index];
}

__device__ __forceinline__ void SetLongWord(Packet& packet, int index, uint64_t value) {
  packet.words[2 * index] = static_cast<uint32_t>(value);
  packet.words[2 * index + 1] = static_cast<uint32_t>(value >> 32);
}

/// Combines `other` into `packet` element by element. Sums wrap around.
__device__ __forceinline__ void Join(ReductionType type, const Packet& other, Packet& packet) {
  if (type == ReductionType::kMaxUint64 || type == ReductionType::kSumInt64) {
#pragma unroll
    for (int i = 0; i < kPacketWords / 2; ++i) {
      const uint64_t a = LongWord(packet, i);
      const uint64_t b = LongWord(other, i);
      SetLongWord(packet, i, type == ReductionType::kSumInt64 ? a + b : max(a, b));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPacketWords; ++i) {
    const uint32_t a = packet.words[i];
    const uint32_t b = other.words[i];
    if (type == ReductionType::kSumInt32) {
      packet.words[i] = a + b;
    } else if (type == ReductionType::kMaxUint32) {
      packet.words[i] = max(a, b);
    } else {
      packet.words[i] =
          static_cast<uint32_t>(max(static_cast<int32_t>(a), static_cast<int32_t>(b)));
    }
  }
}

/// The packets of a launch, which are stored one after another in a slice.
struct Exchange {
  PeerGroup group;
  uint64_t epoch;
  int64_t num_packets;

  /// Returns the slice of rank `from` in the mailbox of rank `at`.
  __device__ __forceinline__ uint4* Slice(int at, int from) const {
    const int64_t index = static_cast<int64_t>(epoch % 2) * group.num_ranks + from;
    return reinterpret_cast<uint4*>(group.mailboxes[at] + index * group.slice_bytes);
  }

  /// Returns the flag in the mailbox of rank `at` that block `block` of rank `from` sets.
  __device__ __forceinline__ uint64_t* Flag(int at, int from, unsigned block) const {
    std::byte* const flags =
        group.mailboxes[at] + MailboxFlagsOffset(group.num_ranks, group.slice_bytes);
    return reinterpret_cast<uint64_t*>(flags) + from * kExchangeBlocksMax + block;
  }

  /// Return the bounds of the packets [Begin(), End()) that the block processes.
  __device__ __forceinline__ int64_t Begin() const { return num_packets * blockIdx.x / gridDim.x; }
  __device__ __forceinline__ int64_t End() const {
    return num_packets * (blockIdx.x + 1) / gridDim.x;
  }
};

__device__ __forceinline__ void PushPacket(const Exchange& exchange, int64_t packet,
                                           const Packet& value) {
  const PeerGroup& group = exchange.group;
  for (int i = 1; i < group.num_ranks; ++i) {
    const int peer = (group.rank + i) % group.num_ranks;  // ranks start with different peers
    exchange.Slice(peer, group.rank)[packet] =
        make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]);
  }
}

/// Returns a packet that `from` has pushed here. The load bypasses caches that could hold the data
/// of an earlier epoch.
__device__ __forceinline__ Packet PushedPacket(const Exchange& exchange, int from, int64_t packet) {
  const uint4 value = __ldcv(exchange.Slice(exchange.group.rank, from) + packet);
  return {{value.x, value.y, value.z, value.w}};
}

__device__ __forceinline__ void StoreRelease(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t LoadAcquire(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

/// Waits until `flag` has reached `epoch`; returns false if aborted.
__device__ bool WaitFor(const uint64_t* flag, uint64_t epoch, const volatile uint32_t* abort) {
  for (int polls = 1; LoadAcquire(flag) < epoch; ++polls) {
    if (polls % kPollsPerAbortCheck == 0 && *abort != 0) return false;
    __nanosleep(kPollSleepNs);
  }
  return true;
}

/// Signals the end of the block's pushes to every peer and waits for the signals of all peers. All
/// threads must call it. Returns false if aborted.
__device__ bool WaitForPeers(const Exchange& exchange) {
  __threadfence_system();
  __syncthreads();
  const PeerGroup& group = exchange.group;
  const int peer = static_cast<int>(threadIdx.x);
  bool arrived = true;
  if (peer < group.num_ranks && peer != group.rank) {
    StoreRelease(exchange.Flag(peer, group.rank, blockIdx.x), exchange.epoch);
    arrived = WaitFor(exchange.Flag(group.rank, peer, blockIdx.x), exchange.epoch, group.abort);
  }
  return __syncthreads_and(arrived ? 1 : 0) != 0;
}

struct ItemsParams {
  Exchange exchange;
  Words arrays[kExchangeItemsMax];
  ReductionType types[kExchangeItemsMax];
  int64_t packet_ends[kExchangeItemsMax];  // end of each array in the slice, in packets
  int32_t num_items;
};

/// The array to which a packet of the slice belongs.
struct ArrayPacket {
  Words array;
  ReductionType type;
  int64_t packet;  // index within the array
};

__device__ __forceinline__ ArrayPacket ArrayPacketOf(const ItemsParams& params, int64_t packet) {
  ArrayPacket found = {};
  int64_t begin = 0;
#pragma unroll
  for (int i = 0; i < kExchangeItemsMax; ++i) {
    if (i >= params.num_items) break;
    if (packet >= begin && packet < params.packet_ends[i]) {
      found = {params.arrays[i], params.types[i], packet - begin};
    }
    begin = params.packet_ends[i];
  }
  return found;
}

__global__ void __launch_bounds__(kThreads)
    PeerExchangeKernel(const __grid_constant__ ItemsParams params) {
  const Exchange& exchange = params.exchange;
  const int64_t begin = exchange.Begin() + threadIdx.x;
  for (int64_t packet = begin; packet < exchange.End(); packet += kThreads) {
    const ArrayPacket at = ArrayPacketOf(params, packet);
    PushPacket(exchange, packet, LoadPacket(at.array, at.packet));
  }
  if (!WaitForPeers(exchange)) return;
  for (int64_t packet = begin; packet < exchange.End(); packet += kThreads) {
    const ArrayPacket at = ArrayPacketOf(params, packet);
    Packet joined = LoadPacket(at.array, at.packet);
    for (int rank = 0; rank < exchange.group.num_ranks; ++rank) {
      if (rank == exchange.group.rank) continue;
      Join(at.type, PushedPacket(exchange, rank, packet), joined);
    }
    StorePacket(at.array, at.packet, joined);
  }
}

struct GatherParams {
  Exchange exchange;
  Words mine;
  uint32_t* all;
  int64_t all_stride;  // words
};

__global__ void __launch_bounds__(kThreads)
    PeerGatherKernel(const __grid_constant__ GatherParams params) {
  const Exchange& exchange = params.exchange;
  const int64_t count = params.mine.count;
  const int64_t begin = exchange.Begin() + threadIdx.x;
  const auto part = [&](int rank) { return Words{params.all + rank * params.all_stride, count}; };
  for (int64_t packet = begin; packet < exchange.End(); packet += kThreads) {
    const Packet value = LoadPacket(params.mine, packet);
    PushPacket(exchange, packet, value);
    if (params.all != nullptr) StorePacket(part(exchange.group.rank), packet, value);
  }
  if (!WaitForPeers(exchange) || params.all == nullptr) return;
  for (int64_t packet = begin; packet < exchange.End(); packet += kThreads) {
    for (int rank = 0; rank < exchange.group.num_ranks; ++rank) {
      if (rank == exchange.group.rank) continue;
      StorePacket(part(rank), packet, PushedPacket(exchange, rank, packet));
    }
  }
}

bool IsValid(const PeerGroup& group, uint64_t epoch) {
  if (group.num_ranks < 1 || group.num_ranks > kExchangeRanksMax || group.rank < 0 ||
      group.rank >= group.num_ranks || group.slice_bytes < 0 ||
      group.slice_bytes % kExchangeAlignment != 0 || group.abort == nullptr || epoch == 0) {
    return false;
  }
  return std::all_of(group.mailboxes, group.mailboxes + group.num_ranks, [](const std::byte* box) {
    return box != nullptr && reinterpret_cast<uintptr_t>(box) % kExchangeAlignment == 0;
  });
}

/// Returns the number of blocks: the same on every rank, and never 0, because later launches rely
/// on this one.
uint32_t NumBlocks(int64_t num_packets) {
  const int64_t blocks = (num_packets + kThreads - 1) / kThreads;
  return static_cast<uint32_t>(std::clamp<int64_t>(blocks, 1, kExchangeBlocksMax));
}

}  // namespace

cudaError_t LaunchPeerExchange(const PeerExchangeParams& params, cudaStream_t stream) {
  if (!IsValid(params.group, params.epoch) || params.num_items < 0 ||
      params.num_items > kExchangeItemsMax) {
    return cudaErrorInvalidValue;
  }
  ItemsParams items{};
  int64_t bytes = 0;
  for (int32_t i = 0; i < params.num_items; ++i) {
    const Reduction& item = params.items[i];
    if (item.count < 0 || item.count > params.group.slice_bytes ||
        (item.count > 0 && item.values == nullptr) ||
        reinterpret_cast<uintptr_t>(item.values) % sizeof(uint32_t) != 0) {
      return cudaErrorInvalidValue;
    }
    bytes += ExchangeBytes(item);
    items.arrays[i] = {static_cast<uint32_t*>(item.values),
                       item.count * ReductionBytes(item.type) / int64_t{sizeof(uint32_t)}};
    items.types[i] = item.type;
    items.packet_ends[i] = bytes / kPacketBytes;
  }
  if (bytes > params.group.slice_bytes) return cudaErrorInvalidValue;
  items.num_items = params.num_items;
  items.exchange = {params.group, params.epoch, bytes / kPacketBytes};
  PeerExchangeKernel<<<NumBlocks(bytes / kPacketBytes), kThreads, 0, stream>>>(items);
  return cudaGetLastError();
}

cudaError_t LaunchPeerGather(const PeerGatherParams& params, cudaStream_t stream) {
  if (!IsValid(params.group, params.epoch) || params.count < 0 ||
      params.count > params.group.slice_bytes || (params.count > 0 && params.mine == nullptr) ||
      (params.all != nullptr && params.all_stride < params.count)) {
    return cudaErrorInvalidValue;
  }
  const int64_t bytes = ExchangeBytes(params.count * int64_t{sizeof(uint64_t)});
  if (bytes > params.group.slice_bytes) return cudaErrorInvalidValue;
  GatherParams gather{};
  gather.exchange = {params.group, params.epoch, bytes / kPacketBytes};
  // The kernel only reads `mine`. The cast lets both kernels share Words.
  gather.mine = {reinterpret_cast<uint32_t*>(const_cast<uint64_t*>(params.mine)), params.count * 2};
  gather.all = reinterpret_cast<uint32_t*>(params.all);
  gather.all_stride = params.all_stride * 2;
  PeerGatherKernel<<<NumBlocks(bytes / kPacketBytes), kThreads, 0, stream>>>(gather);
  return cudaGetLastError();
}

cudaError_t ProbePeerExchange() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, PeerExchangeKernel);
  return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, PeerGatherKernel);
}

}  // namespace logprobd::kernels
