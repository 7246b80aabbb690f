// PeerScoresKernel: combines partials of a few rows on several GPUs into scores on rank 0.
//
// Idea      For few rows the separate launches of shard_sums and peer_exchange would take longer than
//           their work, so each GPU runs one kernel. It sends the largest exponent of the shard's
//           tiles to all ranks, then the shard's sums relative to the row's exponent to rank 0,
//           which writes the scores. Data travels in words of 8 bytes that hold a value and its
//           epoch. A word arrives as a whole, so a matching epoch shows that the value is valid,
//           without a fence or a flag. There are two sets of words, for odd and even epochs. A rank
//           sends its words of epoch e + 1 only after it has read the words of epoch e. A rank
//           writes the words of epoch e + 2, which replace those of e, only after it has received
//           the words of e + 1 from every rank (peer_exchange.cu).
// Work      A block has four groups of 256 threads, one row per group; there are few enough blocks
//           that all are resident. A thread processes every 256th tile of its row.
// Traffic   Reads 16 bytes per tile twice; sends up to 128 bytes per row and peer.
// Numerics  Bit-identical to RowScoresKernel, because integers are combined.
// Limits    kPeerScoresRowsMax rows. The kernel waits for a missing rank until `abort` is set.
// Source    Our own; NCCL's low-latency (LL) protocol also pairs each value with a flag.

#include <cstdint>

#include "kernels/combine/peer_scores.h"
#include "kernels/combine/row_scores.cuh"

namespace logprobd::kernels {
namespace {

using internal::TilesOfRow;

constexpr int kGroupThreads = 256;
constexpr int kGroupWarps = kGroupThreads / 32;
constexpr int kGroups = 4;
constexpr int kThreads = kGroupThreads * kGroups;
constexpr int kPollsPerAbortCheck = 256;  // the abort word may be in host memory

/// Words of a row: those before kSumWord are sent to all other ranks, the others to rank 0. From
/// kMaxWord on a value takes two words.
enum Word {
  kExponentWord,
  kEntropyExponentWord,
  kTargetWord,
  kMinWord,
  kMaxWord,
  kSumWord = 6,
  kWeightedWord = 8,
  kSquaresWord = 10,
  kEntropySumWord = 12,
  kEntropyWeightedWord = 14,
};
static_assert(kEntropyWeightedWord + 2 == kPeerScoresWords);
static_assert(kExchangeRanksMax * kPeerScoresWords == kGroupThreads);

/// Shared memory of a group.
struct GroupMemory {
  int64_t reduced[kGroupWarps];
  uint32_t words[kExchangeRanksMax][kPeerScoresWords];  // words of every rank, including this one
};

/// Reduces the values of the threads of a group; all of them get the result. All threads of the
/// block must call it.
template <typename T, typename Operation>
__device__ T GroupReduce(T value, const Operation& join, GroupMemory& memory) {
  T* const scratch = reinterpret_cast<T*>(memory.reduced);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    value = join(value, __shfl_xor_sync(0xFFFFFFFFU, value, mask));
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x % kGroupThreads / 32] = value;
  __syncthreads();
  value = scratch[0];
#pragma unroll
  for (int other = 1; other < kGroupWarps; ++other) value = join(value, scratch[other]);
  __syncthreads();
  return value;
}

/// Returns the largest exponent of the group's row. All threads of the block must call it.
__device__ int32_t LargestExponent(const TilesOfRow& tiles, GroupMemory& memory) {
  int32_t exponent = kEmptyExponent;
  for (int64_t tile = threadIdx.x % kGroupThreads; tile < tiles.num_tiles; tile += kGroupThreads) {
    exponent = internal::Larger()(exponent, tiles.sums[tile * tiles.tile_stride].exponent);
  }
  return GroupReduce(exponent, internal::Larger(), memory);
}

/// Returns the sums of the group's row relative to `exponent`. All threads of the block must call
/// it.
__device__ RowSums SumTiles(const TilesOfRow& tiles, int32_t exponent, bool wants_sum_squares,
                            GroupMemory& memory) {
  RowSums row;
  row.exponent = exponent;
  for (int64_t tile = threadIdx.x % kGroupThreads; tile < tiles.num_tiles; tile += kGroupThreads) {
    AddTile(row, internal::LoadTileSums(tiles.sums + tile * tiles.tile_stride));
  }
  row.sum = GroupReduce(row.sum, internal::Add(), memory);
  row.weighted = GroupReduce(row.weighted, internal::Add(), memory);
  if (wants_sum_squares) row.sum_squares = GroupReduce(row.sum_squares, internal::Add(), memory);
  return row;
}

/// Exchanges the words of one row; one group runs it. Each thread handles one word of one rank.
class RowExchange {
 public:
  __device__ RowExchange(const PeerStep& step, int64_t row, GroupMemory& memory)
      : step_(step),
        row_(row),
        memory_(memory),
        peer_(static_cast<int>(threadIdx.x) % kGroupThreads / kPeerScoresWords),
        word_(static_cast<int>(threadIdx.x) % kPeerScoresWords) {}

  /// Sets one of this rank's words before it is sent; one thread calls it.
  __device__ void Set(int word, uint32_t value) { memory_.words[step_.group.rank][word] = value; }
  /// Sets two words that form one number.
  __device__ void SetLong(int word, int64_t value) {
    Set(word, static_cast<uint32_t>(value));
    Set(word + 1, static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32));
  }

  /// Sends words [begin, end) to the ranks for which `is_receiver` is true. All threads must call
  /// it, after a barrier.
  template <class IsReceiver>
  __device__ void Send(int begin, int end, const IsReceiver& is_receiver) const {
    if (!HandlesPeerWord(begin, end) || !is_receiver(peer_)) return;
    const uint64_t value =
        static_cast<uint64_t>(Tag()) << 32 | memory_.words[step_.group.rank][word_];
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(MailboxWord(peer_, step_.group.rank)),
                 "l"(value)
                 : "memory");
  }

  /// Waits for words [begin, end) of all other ranks; returns false if aborted.
  __device__ bool Receive(int begin, int end) const {
    if (!HandlesPeerWord(begin, end)) return true;
    const uint64_t* const word = MailboxWord(step_.group.rank, peer_);
    const volatile uint32_t* const abort = step_.group.abort;
    for (int polls = 1;; ++polls) {
      uint64_t value;
      asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
      if (static_cast<uint32_t>(value >> 32) == Tag()) {
        memory_.words[peer_][word_] = static_cast<uint32_t>(value);
        return true;
      }
      if (polls % kPollsPerAbortCheck == 0 && *abort != 0) return false;
    }
  }

  /// Returns a word combined over all ranks.
  template <typename T, typename Operation>
  __device__ T Joined(int word, const Operation& join) const {
    T value = static_cast<T>(memory_.words[0][word]);
    for (int rank = 1; rank < step_.group.num_ranks; ++rank) {
      value = join(value, static_cast<T>(memory_.words[rank][word]));
    }
    return value;
  }

  /// Returns a number that takes two words, combined over all ranks.
  template <typename T, typename Operation>
  __device__ T JoinedLong(int word, const Operation& join) const {
    T value = Long<T>(0, word);
    for (int rank = 1; rank < step_.group.num_ranks; ++rank) {
      value = join(value, Long<T>(rank, word));
    }
    return value;
  }

 private:
  /// Returns true when the thread handles a word in [begin, end) of another rank.
  __device__ bool HandlesPeerWord(int begin, int end) const {
    return peer_ < step_.group.num_ranks && peer_ != step_.group.rank && word_ >= begin &&
           word_ < end;
  }

  template <typename T>
  __device__ T Long(int rank, int word) const {
    return static_cast<T>(static_cast<uint64_t>(memory_.words[rank][word + 1]) << 32 |
                          memory_.words[rank][word]);
  }

  /// Returns the tag of the epoch. It is never 0, which is the initial content of a mailbox.
  __device__ uint32_t Tag() const { return static_cast<uint32_t>(step_.epoch % 0xFFFFFFFFU) + 1; }

  /// Returns the word in the mailbox of rank `at` to which rank `from` sends the thread's word.
  __device__ uint64_t* MailboxWord(int at, int from) const {
    const PeerGroup& group = step_.group;
    auto* const words = reinterpret_cast<uint64_t*>(
        group.mailboxes[at] + MailboxWordsOffset(group.num_ranks, group.slice_bytes));
    const int64_t slice = static_cast<int64_t>(step_.epoch % 2) * group.num_ranks + from;
    return words + (slice * kPeerScoresRowsMax + row_) * kPeerScoresWords + word_;
  }

  const PeerStep& step_;
  const int64_t row_;
  GroupMemory& memory_;
  const int peer_;
  const int word_;
};

/// Sets the words of the target's logit and of the extremes.
__device__ void SetMaxima(const RowScoresParams& scores, int64_t row, RowExchange& exchange) {
  exchange.Set(kTargetWord,
               scores.target_logits == nullptr ? 0 : __float_as_uint(scores.target_logits[row]));
  exchange.Set(kMinWord, scores.min_keys == nullptr ? 0 : scores.min_keys[row]);
  exchange.SetLong(kMaxWord,
                   scores.max_keys == nullptr ? 0 : static_cast<int64_t>(scores.max_keys[row]));
}

/// Replaces rank 0's target logit and extremes with those over all shards.
__device__ void StoreMaxima(const RowScoresParams& scores, int64_t row,
                            const RowExchange& exchange) {
  // The shard that holds the target sends its bits, the others send zeros.
  if (scores.target_logits != nullptr) {
    const_cast<float*>(scores.target_logits)[row] =
        __uint_as_float(exchange.Joined<uint32_t>(kTargetWord, internal::Add()));
  }
  if (scores.min_keys != nullptr) {
    const_cast<uint32_t*>(scores.min_keys)[row] =
        exchange.Joined<uint32_t>(kMinWord, internal::Larger());
  }
  if (scores.max_keys != nullptr) {
    const_cast<uint64_t*>(scores.max_keys)[row] =
        exchange.JoinedLong<uint64_t>(kMaxWord, internal::Larger());
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    PeerScoresKernel(const __grid_constant__ PeerScoresParams params) {
  __shared__ GroupMemory memories[kGroups];
  const RowScoresParams& scores = params.scores;
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  const bool leads = threadIdx.x % kGroupThreads == 0;
  const bool is_first = params.step.group.rank == 0;
  const bool wants_squares = scores.sum_p_squared != nullptr;
  const bool has_entropy_sums = scores.entropy != nullptr && scores.entropy_sums != nullptr;
  GroupMemory& memory = memories[group];
  // Every group takes part in every barrier. A group without a row computes the last row again and
  // sends nothing.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups; first < scores.num_rows;
       first += static_cast<int64_t>(gridDim.x) * kGroups) {
    const bool has_row = first + group < scores.num_rows;
    const int64_t row = has_row ? first + group : scores.num_rows - 1;
    RowExchange exchange(params.step, row, memory);
    const int64_t first_partial = scores.layout.At(row, 0);
    const TilesOfRow tiles = {scores.sums + first_partial, scores.layout.tile_stride,
                              scores.num_tiles};
    const TilesOfRow entropy_tiles = {
        has_entropy_sums ? scores.entropy_sums + first_partial : nullptr, scores.layout.tile_stride,
        has_entropy_sums ? scores.num_tiles : 0};
    const int32_t own = LargestExponent(tiles, memory);
    const int32_t own_entropy = LargestExponent(entropy_tiles, memory);
    if (leads) {
      exchange.Set(kExponentWord, static_cast<uint32_t>(own));
      exchange.Set(kEntropyExponentWord, static_cast<uint32_t>(own_entropy));
      SetMaxima(scores, row, exchange);
    }
    __syncthreads();
    if (has_row) exchange.Send(kExponentWord, kSumWord, [](int) { return true; });
    const bool has_received = !has_row || exchange.Receive(kExponentWord, kSumWord);
    if (__syncthreads_and(has_received ? 1 : 0) == 0) return;

    RowSums sums = SumTiles(tiles, exchange.Joined<int32_t>(kExponentWord, internal::Larger()),
                            wants_squares, memory);
    RowSums entropy_sums =
        SumTiles(entropy_tiles, exchange.Joined<int32_t>(kEntropyExponentWord, internal::Larger()),
                 false, memory);
    if (leads) {
      exchange.SetLong(kSumWord, sums.sum);
      exchange.SetLong(kWeightedWord, sums.weighted);
      exchange.SetLong(kSquaresWord, sums.sum_squares);
      exchange.SetLong(kEntropySumWord, entropy_sums.sum);
      exchange.SetLong(kEntropyWeightedWord, entropy_sums.weighted);
    }
    __syncthreads();
    if (has_row && !is_first) {
      exchange.Send(kSumWord, kPeerScoresWords, [](int peer) { return peer == 0; });
    }
    const bool has_sums = !has_row || !is_first || exchange.Receive(kSumWord, kPeerScoresWords);
    if (__syncthreads_and(has_sums ? 1 : 0) == 0) return;

    if (is_first && leads && has_row) {
      sums.sum = exchange.JoinedLong<int64_t>(kSumWord, internal::Add());
      sums.weighted = exchange.JoinedLong<int64_t>(kWeightedWord, internal::Add());
      sums.sum_squares = exchange.JoinedLong<int64_t>(kSquaresWord, internal::Add());
      entropy_sums.sum = exchange.JoinedLong<int64_t>(kEntropySumWord, internal::Add());
      entropy_sums.weighted = exchange.JoinedLong<int64_t>(kEntropyWeightedWord, internal::Add());
      StoreMaxima(scores, row, exchange);
      internal::WriteScores(scores, row,
                            {sums, has_entropy_sums ? entropy_sums : sums, has_entropy_sums});
    }
    __syncthreads();  // all words have been read before the next row sets them
  }
}

bool IsValid(const PeerGroup& group, uint64_t epoch) {
  if (group.num_ranks < 1 || group.num_ranks > kExchangeRanksMax || group.rank < 0 ||
      group.rank >= group.num_ranks || group.slice_bytes < 0 || group.abort == nullptr ||
      epoch == 0) {
    return false;
  }
  for (int rank = 0; rank < group.num_ranks; ++rank) {
    if (group.mailboxes[rank] == nullptr) return false;
  }
  return true;
}

}  // namespace

cudaError_t LaunchPeerScores(const PeerScoresParams& params, cudaStream_t stream) {
  const RowScoresParams& scores = params.scores;
  if (!IsValid(params.step.group, params.step.epoch) || !internal::HasValidOutputs(scores) ||
      scores.target_rank != nullptr || scores.num_rows < 1 ||
      scores.num_rows > kPeerScoresRowsMax || scores.num_tiles < 1 ||
      scores.num_tiles > NumTiles(scores.vocab_size) || scores.layout.row_stride < 1 ||
      scores.layout.tile_stride < 1 || scores.sums == nullptr) {
    return cudaErrorInvalidValue;
  }
  const int64_t blocks = (scores.num_rows + kGroups - 1) / kGroups;
  PeerScoresKernel<<<static_cast<uint32_t>(blocks < kExchangeBlocksMax ? blocks
                                                                       : kExchangeBlocksMax),
                     kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t ProbePeerScores() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, PeerScoresKernel);
}

}  // namespace logprobd::kernels
