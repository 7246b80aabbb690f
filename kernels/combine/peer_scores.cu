// PeerScoresKernel: tile partials of a few rows on several GPUs -> the rows' scores on the first.
//
// Idea      A batch of a few rows takes less time than the launches between its partials and its
//           scores would. So one kernel on every GPU: the largest exponent of the shard's tiles is
//           told to all, the shard's sums relative to the row's are told to rank 0, which writes
//           the scores. What is told travels in words of 8 bytes, a value and its epoch: they
//           arrive whole, so the epoch says that the value is there, and neither a fence nor a
//           flag is waited for. Words exist twice, for odd and even epochs: a rank writes those of
//           epoch e + 2 only after it has heard of epoch e + 1 from every rank, and so after these
//           have read those of e (peer_exchange.cu).
// Work      A block has four groups of 256 threads, a row each; few enough blocks that all are
//           resident. A thread takes every 256th tile of its row.
// Traffic   16 bytes a tile, twice; up to 128 bytes a row and peer.
// Numerics  As RowScoresKernel, bit for bit: integers are what is joined.
// Limits    kPeerScoresRowsMax rows. A rank that never comes is waited for until `abort`.
// Source    Our own; a word with its flag is what NCCL calls its low-latency protocol.

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
constexpr int kPollsBetweenLooks = 256;  // at the abort word, which lies across the bus

/// Words that a rank tells all others of a row, then those that it tells rank 0.
enum Word {
  kExponentWord,
  kEntropyExponentWord,
  kTargetWord,
  kMinWord,
  kMaxWord,  // two
  kSumWord = 6,
  kWeightedWord = 8,
  kSquaresWord = 10,
  kEntropySumWord = 12,
  kEntropyWeightedWord = 14,
};
static_assert(kEntropyWeightedWord + 2 == kPeerScoresWords);
static_assert(kExchangeRanksMax * kPeerScoresWords == kGroupThreads);

/// What a group shares.
struct GroupMemory {
  int64_t reduced[kGroupWarps];
  uint32_t words[kExchangeRanksMax][kPeerScoresWords];  // of every rank, this one too
};

/// Joins a value of each thread of a group; all of them get the result. All threads of the block
/// call it.
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

__device__ int32_t LargestExponent(const TilesOfRow& tiles, GroupMemory& memory) {
  int32_t exponent = kEmptyExponent;
  for (int64_t tile = threadIdx.x % kGroupThreads; tile < tiles.num_tiles; tile += kGroupThreads) {
    exponent = internal::Larger()(exponent, tiles.sums[tile * tiles.tile_stride].exponent);
  }
  return GroupReduce(exponent, internal::Larger(), memory);
}

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

/// What is exchanged of one row, by one group. A thread has a rank and a word.
class RowExchange {
 public:
  __device__ RowExchange(const PeerStep& step, int64_t row, GroupMemory& memory)
      : step_(step),
        row_(row),
        memory_(memory),
        peer_(static_cast<int>(threadIdx.x) % kGroupThreads / kPeerScoresWords),
        word_(static_cast<int>(threadIdx.x) % kPeerScoresWords) {}

  /// This rank's words, before they are told; one thread calls it.
  __device__ void Set(int word, uint32_t value) { memory_.words[step_.group.rank][word] = value; }
  __device__ void SetLong(int word, int64_t value) {
    Set(word, static_cast<uint32_t>(value));
    Set(word + 1, static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32));
  }

  /// Tells words [begin, end) to the ranks for which `is_told` holds. All threads call it, after a
  /// barrier.
  template <class IsTold>
  __device__ void Tell(int begin, int end, const IsTold& is_told) const {
    if (!IsOfAPeer(begin, end) || !is_told(peer_)) return;
    const uint64_t value =
        static_cast<uint64_t>(Tag()) << 32 | memory_.words[step_.group.rank][word_];
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(Place(peer_, step_.group.rank)),
                 "l"(value)
                 : "memory");
  }

  /// Hears words [begin, end) of all other ranks; false: aborted.
  __device__ bool Hear(int begin, int end) const {
    if (!IsOfAPeer(begin, end)) return true;
    const uint64_t* const place = Place(step_.group.rank, peer_);
    const volatile uint32_t* const abort = step_.group.abort;
    for (int polls = 1;; ++polls) {
      uint64_t value;
      asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
      if (static_cast<uint32_t>(value >> 32) == Tag()) {
        memory_.words[peer_][word_] = static_cast<uint32_t>(value);
        return true;
      }
      if (polls % kPollsBetweenLooks == 0 && *abort != 0) return false;
    }
  }

  /// A word of all ranks, joined.
  template <typename T, typename Operation>
  __device__ T Joined(int word, const Operation& join) const {
    T value = static_cast<T>(memory_.words[0][word]);
    for (int rank = 1; rank < step_.group.num_ranks; ++rank) {
      value = join(value, static_cast<T>(memory_.words[rank][word]));
    }
    return value;
  }

  /// Likewise of two words that make one number.
  template <typename T, typename Operation>
  __device__ T JoinedLong(int word, const Operation& join) const {
    T value = Long<T>(0, word);
    for (int rank = 1; rank < step_.group.num_ranks; ++rank) {
      value = join(value, Long<T>(rank, word));
    }
    return value;
  }

 private:
  __device__ bool IsOfAPeer(int begin, int end) const {
    return peer_ < step_.group.num_ranks && peer_ != step_.group.rank && word_ >= begin &&
           word_ < end;
  }

  template <typename T>
  __device__ T Long(int rank, int word) const {
    return static_cast<T>(static_cast<uint64_t>(memory_.words[rank][word + 1]) << 32 |
                          memory_.words[rank][word]);
  }

  /// Zero, which memory holds at first, is no epoch's.
  __device__ uint32_t Tag() const { return static_cast<uint32_t>(step_.epoch % 0xFFFFFFFFU) + 1; }

  /// Where rank `from` tells rank `at` the thread's word.
  __device__ uint64_t* Place(int at, int from) const {
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

__device__ void SetMaxima(const RowScoresParams& scores, int64_t row, RowExchange& exchange) {
  exchange.Set(kTargetWord,
               scores.target_logits == nullptr ? 0 : __float_as_uint(scores.target_logits[row]));
  exchange.Set(kMinWord, scores.min_keys == nullptr ? 0 : scores.min_keys[row]);
  exchange.SetLong(kMaxWord,
                   scores.max_keys == nullptr ? 0 : static_cast<int64_t>(scores.max_keys[row]));
}

/// Rank 0's arrays become those of all shards.
__device__ void StoreMaxima(const RowScoresParams& scores, int64_t row,
                            const RowExchange& exchange) {
  // Only the target's owner has bits that are not zero.
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
  // Every group takes part in every barrier; one without a row repeats another's and stays silent.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups; first < scores.num_rows;
       first += static_cast<int64_t>(gridDim.x) * kGroups) {
    const bool has_row = first + group < scores.num_rows;
    const int64_t row = has_row ? first + group : scores.num_rows - 1;
    RowExchange exchange(params.step, row, memory);
    const int64_t place = scores.layout.At(row, 0);
    const TilesOfRow tiles = {scores.sums + place, scores.layout.tile_stride, scores.num_tiles};
    const TilesOfRow entropy_tiles = {has_entropy_sums ? scores.entropy_sums + place : nullptr,
                                      scores.layout.tile_stride,
                                      has_entropy_sums ? scores.num_tiles : 0};
    const int32_t own = LargestExponent(tiles, memory);
    const int32_t own_entropy = LargestExponent(entropy_tiles, memory);
    if (leads) {
      exchange.Set(kExponentWord, static_cast<uint32_t>(own));
      exchange.Set(kEntropyExponentWord, static_cast<uint32_t>(own_entropy));
      SetMaxima(scores, row, exchange);
    }
    __syncthreads();
    if (has_row) exchange.Tell(kExponentWord, kSumWord, [](int) { return true; });
    const bool is_heard = !has_row || exchange.Hear(kExponentWord, kSumWord);
    if (__syncthreads_and(is_heard ? 1 : 0) == 0) return;

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
      exchange.Tell(kSumWord, kPeerScoresWords, [](int peer) { return peer == 0; });
    }
    const bool is_summed = !has_row || !is_first || exchange.Hear(kSumWord, kPeerScoresWords);
    if (__syncthreads_and(is_summed ? 1 : 0) == 0) return;

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
    __syncthreads();  // the words are set anew
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
      scores.num_rows < 1 || scores.num_rows > kPeerScoresRowsMax || scores.num_tiles < 1 ||
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
