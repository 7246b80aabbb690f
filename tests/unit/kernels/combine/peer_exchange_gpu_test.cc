#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/combine/peer_exchange.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;

/// Ranks on one device wait for each other, so no two of their streams may share a hardware queue.
/// CUDA reads this variable when it starts.
class QueueForEveryStream : public ::testing::Environment {
 public:
  void SetUp() override { setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1); }
};
const ::testing::Environment* const kEnvironment =
    ::testing::AddGlobalTestEnvironment(new QueueForEveryStream);

constexpr uint64_t kPoison = 0x7777'7777'7777'7777;
/// Timeout. An exchange takes microseconds, so one that takes this long hangs and is aborted.
constexpr auto kPatience = std::chrono::seconds(60);

bool ReachEachOther(const std::vector<int>& devices) {
  for (const int device : devices) {
    for (const int peer : devices) {
      int can_access = 0;
      EXPECT_EQ(cudaDeviceCanAccessPeer(&can_access, device, peer), cudaSuccess);
      if (device != peer && can_access == 0) return false;
    }
  }
  return true;
}

/// Returns the device of each rank: once all on the first device, once distributed over all
/// devices.
std::vector<std::vector<int>> Arrangements(int num_ranks) {
  std::vector<std::vector<int>> arrangements = {std::vector<int>(static_cast<size_t>(num_ranks))};
  int num_devices = 0;
  EXPECT_EQ(cudaGetDeviceCount(&num_devices), cudaSuccess);
  std::vector<int> spread;
  for (int rank = 0; rank < num_ranks; ++rank) spread.push_back(rank % num_devices);
  if (spread != arrangements[0] && ReachEachOther(spread)) arrangements.push_back(spread);
  return arrangements;
}

/// One exchange or gather of arrays in the memory of a rank.
struct Step {
  struct Item {
    ReductionType type = ReductionType::kMaxInt32;
    int64_t word = 0;  ///< Position of its first word.
    int64_t count = 0;
  };
  std::vector<Item> items = {};
  bool is_gather = false;
  bool is_in_place = false;  ///< A rank's input is its part of the output.
  int64_t mine_word = 0;
  int64_t all_word = 0;
  int64_t count = 0;

  int64_t MineWord(size_t rank) const {
    return is_in_place ? all_word + 2 * count * static_cast<int64_t>(rank) : mine_word;
  }
};

using Memory = std::vector<uint32_t>;  // the words of one rank

uint64_t Element(const Memory& words, const Step::Item& item, int64_t index) {
  uint64_t value = 0;
  const auto bytes = static_cast<size_t>(ReductionBytes(item.type));
  std::memcpy(&value, words.data() + item.word + index * static_cast<int64_t>(bytes / 4), bytes);
  return value;
}

void SetElement(Memory& words, const Step::Item& item, int64_t index, uint64_t value) {
  const auto bytes = static_cast<size_t>(ReductionBytes(item.type));
  std::memcpy(words.data() + item.word + index * static_cast<int64_t>(bytes / 4), &value, bytes);
}

uint64_t Joined(ReductionType type, uint64_t a, uint64_t b) {
  switch (type) {
    case ReductionType::kMaxInt32:
      return static_cast<uint32_t>(std::max(static_cast<int32_t>(a), static_cast<int32_t>(b)));
    case ReductionType::kMaxUint32:
    case ReductionType::kMaxUint64:
      return std::max(a, b);
    case ReductionType::kSumInt32:
    case ReductionType::kSumInt64:
      return a + b;
  }
  return 0;
}

/// Applies a step to the memory of all ranks, on the host.
void Apply(const Step& step, std::vector<Memory>& ranks) {
  for (const Step::Item& item : step.items) {
    for (int64_t i = 0; i < item.count; ++i) {
      uint64_t value = Element(ranks[0], item, i);
      for (size_t rank = 1; rank < ranks.size(); ++rank) {
        value = Joined(item.type, value, Element(ranks[rank], item, i));
      }
      for (Memory& words : ranks) SetElement(words, item, i, value);
    }
  }
  if (!step.is_gather) return;
  for (size_t from = 0; from < ranks.size(); ++from) {
    const auto mine = ranks[from].begin() + step.MineWord(from);
    const Memory values(mine, mine + 2 * step.count);
    for (Memory& words : ranks) {
      std::copy(values.begin(), values.end(),
                words.begin() + step.all_word + 2 * step.count * static_cast<int64_t>(from));
    }
  }
}

/// Ranks, each with a mailbox and a stream.
class Ranks {
 public:
  Ranks(const std::vector<int>& devices, int64_t slice_bytes) : devices_(devices) {
    void* word = nullptr;
    EXPECT_EQ(cudaHostAlloc(&word, sizeof(uint32_t), cudaHostAllocPortable | cudaHostAllocMapped),
              cudaSuccess);
    abort_ = static_cast<volatile uint32_t*>(word);
    *abort_ = 0;
    const auto num_ranks = static_cast<int32_t>(devices.size());
    group_.num_ranks = num_ranks;
    group_.slice_bytes = slice_bytes;
    group_.abort = const_cast<const uint32_t*>(abort_);
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      Use(rank);
      for (const int peer : devices) EnableAccess(devices[static_cast<size_t>(rank)], peer);
      EXPECT_EQ(ProbePeerExchange(), cudaSuccess);
      mailboxes_.push_back(std::make_unique<DeviceArray<uint8_t>>(
          std::vector<uint8_t>(static_cast<size_t>(MailboxBytes(num_ranks, slice_bytes)), 0)));
      group_.mailboxes[rank] = reinterpret_cast<std::byte*>(mailboxes_.back()->data());
      streams_.emplace_back();
      EXPECT_EQ(cudaStreamCreateWithFlags(&streams_.back(), cudaStreamNonBlocking), cudaSuccess);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
  }
  ~Ranks() {
    *abort_ = 1;
    for (cudaStream_t stream : streams_) EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    mailboxes_.clear();
    EXPECT_EQ(cudaFreeHost(const_cast<uint32_t*>(abort_)), cudaSuccess);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  PeerGroup Group(int32_t rank) const {
    PeerGroup group = group_;
    group.rank = rank;
    return group;
  }

  /// Runs the steps on every rank, each with its own memory, which is read back afterwards.
  std::vector<Memory> Run(const std::vector<Step>& steps, const std::vector<Memory>& memory) {
    constexpr size_t kStepsBetweenWaits = 50;
    std::vector<std::unique_ptr<DeviceArray<uint32_t>>> arrays;
    for (size_t rank = 0; rank < memory.size(); ++rank) {
      Use(static_cast<int32_t>(rank));
      arrays.push_back(std::make_unique<DeviceArray<uint32_t>>(memory[rank]));
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    for (size_t i = 0; i < steps.size(); ++i) {
      ++epoch_;
      for (size_t rank = 0; rank < memory.size(); ++rank) {
        Launch(static_cast<int32_t>(rank), steps[i], arrays[rank]->data());
      }
      if (i % kStepsBetweenWaits == 0) Wait();
    }
    Wait();
    std::vector<Memory> results;
    results.reserve(arrays.size());
    for (const auto& array : arrays) results.push_back(array->Read());
    return results;
  }

  void Abort() { *abort_ = 1; }

  void Launch(int32_t rank, const Step& step, uint32_t* words) {
    Use(rank);
    const int64_t mine_word = step.MineWord(static_cast<size_t>(rank));
    cudaStream_t stream = streams_[static_cast<size_t>(rank)];
    cudaError_t error = cudaSuccess;
    if (step.is_gather) {
      error = LaunchPeerGather({.group = Group(rank),
                                .epoch = epoch_,
                                .mine = reinterpret_cast<const uint64_t*>(words + mine_word),
                                .count = step.count,
                                .all = reinterpret_cast<uint64_t*>(words + step.all_word),
                                .all_stride = step.count},
                               stream);
    } else {
      PeerExchangeParams params;
      params.group = Group(rank);
      params.epoch = epoch_;
      for (const Step::Item& item : step.items) {
        params.items[params.num_items++] = {words + item.word, item.count, item.type};
      }
      error = LaunchPeerExchange(params, stream);
    }
    EXPECT_EQ(error, cudaSuccess);
    if (error != cudaSuccess) Abort();  // otherwise the other ranks wait forever
  }

  /// Waits for all streams; a stream that hangs fails the test.
  void Wait() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    for (cudaStream_t stream : streams_) {
      cudaError_t state = cudaStreamQuery(stream);
      while (state == cudaErrorNotReady) {
        if (*abort_ == 0 && std::chrono::steady_clock::now() > deadline) {
          ADD_FAILURE() << "an exchange hangs";
          Abort();
        }
        std::this_thread::yield();
        state = cudaStreamQuery(stream);
      }
      EXPECT_EQ(state, cudaSuccess);
    }
  }

  void NextEpoch() { ++epoch_; }

 private:
  void Use(int32_t rank) const {
    EXPECT_EQ(cudaSetDevice(devices_[static_cast<size_t>(rank)]), cudaSuccess);
  }

  static void EnableAccess(int device, int peer) {
    if (device == peer) return;
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    EXPECT_TRUE(error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled);
    static_cast<void>(cudaGetLastError());  // otherwise a launch would return this error
  }

  std::vector<int> devices_;
  PeerGroup group_;
  uint64_t epoch_ = 0;
  volatile uint32_t* abort_ = nullptr;
  std::vector<std::unique_ptr<DeviceArray<uint8_t>>> mailboxes_;
  std::vector<cudaStream_t> streams_;
};

/// Makes values that differ on every rank.
std::vector<Memory> MakeMemory(size_t num_ranks, int64_t num_words, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Memory> ranks(num_ranks, Memory(static_cast<size_t>(num_words)));
  for (Memory& words : ranks) {
    std::generate(words.begin(), words.end(), [&] { return static_cast<uint32_t>(random()); });
  }
  return ranks;
}

void ExpectSteps(Ranks& ranks, const std::vector<Step>& steps, std::vector<Memory> memory) {
  const std::vector<Memory> results = ranks.Run(steps, memory);
  for (const Step& step : steps) Apply(step, memory);
  for (size_t rank = 0; rank < memory.size(); ++rank) {
    const auto first = std::mismatch(memory[rank].begin(), memory[rank].end(),
                                     results[rank].begin(), results[rank].end());
    EXPECT_EQ(first.first - memory[rank].begin(), static_cast<int64_t>(memory[rank].size()))
        << "the first word that differs on rank " << rank << " of " << memory.size();
  }
}

constexpr ReductionType kTypes[] = {ReductionType::kMaxInt32, ReductionType::kMaxUint32,
                                    ReductionType::kMaxUint64, ReductionType::kSumInt32,
                                    ReductionType::kSumInt64};

class PeerExchangeTest : public testing::GpuTest {};

TEST_F(PeerExchangeTest, ReducesEveryTypeAndSizeAsTheHostDoes) {
  constexpr int64_t kSliceBytes = 1 << 20;
  for (const int num_ranks : {1, 2, 3, 8}) {
    for (const std::vector<int>& devices : Arrangements(num_ranks)) {
      Ranks ranks(devices, kSliceBytes);
      for (const ReductionType type : kTypes) {
        const int64_t whole_slice = kSliceBytes / ReductionBytes(type);
        for (const int64_t count : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{5}, int64_t{1'023},
                                    int64_t{1'024}, int64_t{1'029}, int64_t{70'001}, whole_slice}) {
          SCOPED_TRACE(::testing::Message()
                       << num_ranks << " ranks, the last on device " << devices.back() << ", type "
                       << static_cast<int>(type) << ", count " << count);
          const int64_t words = count * ReductionBytes(type) / 4;

          // The array is aligned to 16 bytes, then to 8 bytes only. Words around it must not
          // change.
          ExpectSteps(ranks, {{.items = {{type, 4, count}}}},
                      MakeMemory(devices.size(), words + 8, 1));
          ExpectSteps(ranks, {{.items = {{type, 2, count}}}},
                      MakeMemory(devices.size(), words + 8, 2));
        }
      }
    }
  }
}

TEST_F(PeerExchangeTest, ReducesTheArraysOfALaunchSeparately) {
  for (const std::vector<int>& devices : Arrangements(4)) {
    Ranks ranks(devices, 1 << 16);
    Step step;
    int64_t word = 2;
    for (const int64_t count : {1, 0, 700, 3, 1'025, 0, 2, 999}) {
      const ReductionType type = kTypes[step.items.size() % std::size(kTypes)];
      step.items.push_back({type, word, count});
      word += count * ReductionBytes(type) / 4 + 3;
      word += word % 2;
    }

    ExpectSteps(ranks, {step, step, step}, MakeMemory(devices.size(), word, 3));
  }
}

TEST_F(PeerExchangeTest, GathersTheArraysOfAllRanks) {
  for (const int num_ranks : {1, 2, 3, 8}) {
    for (const std::vector<int>& devices : Arrangements(num_ranks)) {
      Ranks ranks(devices, 1 << 18);
      for (const int64_t count : {0, 1, 2, 3, 511, 512, 1'001, 32'768}) {
        SCOPED_TRACE(::testing::Message() << num_ranks << " ranks, the last on device "
                                          << devices.back() << ", count " << count);
        const int64_t all_word = 2 * count + 2;
        const Step apart = {.is_gather = true, .all_word = all_word, .count = count};
        const Step in_place = {
            .is_gather = true, .is_in_place = true, .all_word = all_word, .count = count};

        ExpectSteps(ranks, {in_place},
                    MakeMemory(devices.size(), all_word + 2 * count * num_ranks + 2, 7));
        ExpectSteps(ranks, {apart},
                    MakeMemory(devices.size(), all_word + 2 * count * num_ranks + 2, 4));
      }
    }
  }
}

// Epochs of all sizes follow one another without a pause, so that ranks run as far ahead of each
// other as they can. The test would detect values of one epoch in another.
TEST_F(PeerExchangeTest, AThousandEpochsOfRandomSizesDoNotMix) {
  constexpr int64_t kSliceBytes = 1 << 16;
  for (const int num_ranks : {2, 4}) {
    for (const std::vector<int>& devices : Arrangements(num_ranks)) {
      Ranks ranks(devices, kSliceBytes);
      std::mt19937 random(5);
      std::vector<Step> steps(1'000);
      int64_t word = 0;
      for (Step& step : steps) {
        int64_t bytes_left = random() % 4 == 0 ? kSliceBytes : 512;
        step.is_gather = random() % 4 == 0;
        if (step.is_gather) {
          step.count = static_cast<int64_t>(random()) % (bytes_left / 8);
          step.mine_word = word;
          step.all_word = word + 2 * step.count;
          word += 2 * step.count * (num_ranks + 1);
          continue;
        }
        const size_t num_items = random() % (kExchangeItemsMax + 1);  // 0 is a barrier
        while (step.items.size() < num_items) {
          const ReductionType type = kTypes[random() % std::size(kTypes)];
          const int64_t count =
              static_cast<int64_t>(random()) % (bytes_left / 2 / ReductionBytes(type) + 1);
          step.items.push_back({type, word, count});
          bytes_left -= ExchangeBytes({.count = count, .type = type});
          word += count * ReductionBytes(type) / 4;
          word += word % 2;
        }
      }

      ExpectSteps(ranks, steps, MakeMemory(devices.size(), word, 6));
    }
  }
}

TEST_F(PeerExchangeTest, ARankWithoutPeersEndsWhenAborted) {
  for (const bool is_set_before : {true, false}) {
    for (const bool is_gather : {true, false}) {
      Ranks ranks({0, 0}, 1 << 16);
      const DeviceArray<uint32_t> words(Memory(4'096, 1));
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const Step step = {.items = {{ReductionType::kSumInt32, 0, 1'000}},
                         .is_gather = is_gather,
                         .all_word = 1'024,
                         .count = 500};
      if (is_set_before) ranks.Abort();

      ranks.NextEpoch();
      ranks.Launch(0, step, words.data());
      if (!is_set_before) ranks.Abort();

      ranks.Wait();
    }
  }
}

TEST_F(PeerExchangeTest, RefusesBrokenBounds) {
  Ranks ranks({0}, 1'024);
  const DeviceArray<uint64_t> values(std::vector<uint64_t>(256, kPoison));
  PeerExchangeParams good;
  good.group = ranks.Group(0);
  good.epoch = 1;
  good.num_items = 2;
  good.items[0] = {values.data(), 65, ReductionType::kSumInt64};  // takes 528 bytes of a slice
  good.items[1] = {values.data() + 128, 62, ReductionType::kMaxUint64};
  const auto exchange_with = [&](const auto& change) {
    PeerExchangeParams params = good;
    change(params);
    return LaunchPeerExchange(params, nullptr);
  };
  using Params = PeerExchangeParams;
  EXPECT_EQ(exchange_with([](Params&) {}), cudaSuccess);
  EXPECT_EQ(exchange_with([](Params& p) { p.items[1].count = 63; }), cudaErrorInvalidValue);
  EXPECT_EQ(exchange_with([](Params& p) { p.items[1].count = -1; }), cudaErrorInvalidValue);
  EXPECT_EQ(exchange_with([](Params& p) { p.items[0].values = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(exchange_with([](Params& p) { p.num_items = 9; }), cudaErrorInvalidValue);
  EXPECT_EQ(exchange_with([](Params& p) { p.epoch = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(exchange_with([](Params& p) { p.group.rank = 1; }), cudaErrorInvalidValue);
  EXPECT_EQ(exchange_with([](Params& p) { p.group.num_ranks = 17; }), cudaErrorInvalidValue);
  EXPECT_EQ(exchange_with([](Params& p) { p.group.num_ranks = 2; }), cudaErrorInvalidValue);
  EXPECT_EQ(exchange_with([](Params& p) { p.group.slice_bytes = 1'032; }), cudaErrorInvalidValue);
  EXPECT_EQ(exchange_with([](Params& p) { p.group.abort = nullptr; }), cudaErrorInvalidValue);
  PeerGatherParams gather = {.group = ranks.Group(0),
                             .epoch = 2,
                             .mine = values.data(),
                             .count = 128,
                             .all = values.data() + 128,
                             .all_stride = 128};
  EXPECT_EQ(LaunchPeerGather(gather, nullptr), cudaSuccess);
  gather.count = 129;
  EXPECT_EQ(LaunchPeerGather(gather, nullptr), cudaErrorInvalidValue);
  gather.count = 128;
  gather.all_stride = 127;
  EXPECT_EQ(LaunchPeerGather(gather, nullptr), cudaErrorInvalidValue);
  gather.all = nullptr;
  EXPECT_EQ(LaunchPeerGather(gather, nullptr), cudaSuccess);
  gather.count = 0;
  gather.mine = nullptr;
  EXPECT_EQ(LaunchPeerGather(gather, nullptr), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace logprobd::kernels
