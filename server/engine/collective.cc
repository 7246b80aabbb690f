#include "server/engine/collective.h"

#include <algorithm>
#include <thread>

#include "absl/strings/cord.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

using kernels::Reduction;
using kernels::ReductionType;

/// URL of the status payload that holds the name of a collective.
constexpr absl::string_view kNameUrl = "logprobd/collective";

/// Number of times that a thread polls the barrier before it sleeps. Shards arrive within
/// microseconds of each other.
constexpr int kNumSpins = 200;

/// Reduces elements [begin, end) of one item over all ranks, into every rank's array.
template <typename T, typename Operation>
void Reduce(const std::vector<Reduction>& ranks, int64_t begin, int64_t end,
            const Operation& operation) {
  for (int64_t i = begin; i < end; ++i) {
    T value = static_cast<const T*>(ranks.front().values)[i];
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      value = operation(value, static_cast<const T*>(ranks[rank].values)[i]);
    }
    for (const Reduction& item : ranks) static_cast<T*>(item.values)[i] = value;
  }
}

void Reduce(const std::vector<Reduction>& ranks, int64_t begin, int64_t end) {
  const auto larger = [](auto a, auto b) { return std::max(a, b); };
  // Sums are unsigned, so they wrap. If one rank has the bits of a float and all other ranks have
  // zeros, the sum has exactly these bits.
  const auto sum = [](auto a, auto b) { return a + b; };
  switch (ranks.front().type) {
    case ReductionType::kMaxInt32:
      return Reduce<int32_t>(ranks, begin, end, larger);
    case ReductionType::kMaxUint32:
      return Reduce<uint32_t>(ranks, begin, end, larger);
    case ReductionType::kMaxUint64:
      return Reduce<uint64_t>(ranks, begin, end, larger);
    case ReductionType::kSumInt32:
      return Reduce<uint32_t>(ranks, begin, end, sum);
    case ReductionType::kSumInt64:
      return Reduce<uint64_t>(ranks, begin, end, sum);
  }
}

}  // namespace

absl::Status CollectiveError(absl::string_view name, absl::string_view message) {
  absl::Status status = absl::InternalError(message);
  status.SetPayload(kNameUrl, absl::Cord(name));
  return status;
}

std::optional<std::string> CollectiveOf(const absl::Status& status) {
  const absl::optional<absl::Cord> name = status.GetPayload(kNameUrl);
  if (!name.has_value()) return std::nullopt;
  return std::string(*name);
}

bool Rendezvous::Meet() {
  const uint32_t round = round_.load(std::memory_order_acquire);
  if (is_broken_.load(std::memory_order_acquire)) return false;
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_acq_rel);
    round_.notify_all();
  } else {
    for (int spin = 0; spin < kNumSpins && round_.load(std::memory_order_acquire) == round;
         ++spin) {
      std::this_thread::yield();
    }
    round_.wait(round, std::memory_order_acquire);
  }
  return !is_broken_.load(std::memory_order_acquire);
}

void Rendezvous::Break() {
  is_broken_.store(true, std::memory_order_release);
  round_.fetch_add(1, std::memory_order_acq_rel);
  round_.notify_all();
}

InProcessCollective::InProcessCollective(int32_t num_ranks)
    : barrier_(num_ranks), arrays_(static_cast<size_t>(num_ranks)) {}

absl::Status InProcessCollective::Meet() {
  return barrier_.Meet() ? absl::OkStatus()
                         : absl::AbortedError("the exchange between shards was aborted");
}

absl::Status InProcessCollective::AllReduce(int32_t rank, absl::Span<const Reduction> items,
                                            ShardStream /*stream*/) {
  arrays_[static_cast<size_t>(rank)].items = items;
  LOGPROBD_RETURN_IF_ERROR(Meet());
  const auto num_ranks = static_cast<int64_t>(arrays_.size());
  for (size_t i = 0; i < items.size(); ++i) {
    std::vector<Reduction> ranks;
    for (const Arrays& arrays : arrays_) {
      LOGPROBD_CHECK(arrays.items.size() == items.size() &&
                     arrays.items[i].count == items[i].count &&
                     arrays.items[i].type == items[i].type);
      ranks.push_back(arrays.items[i]);
    }
    // Each rank reduces its part of the elements.
    Reduce(ranks, items[i].count * rank / num_ranks, items[i].count * (rank + 1) / num_ranks);
  }
  return Meet();
}

absl::Status InProcessCollective::Gather(int32_t rank, const uint64_t* mine, int64_t count,
                                         uint64_t* all, ShardStream /*stream*/) {
  arrays_[static_cast<size_t>(rank)].gathered = mine;
  LOGPROBD_RETURN_IF_ERROR(Meet());
  if (rank == 0) {
    for (const Arrays& arrays : arrays_) all = std::copy_n(arrays.gathered, count, all);
  }
  return Meet();
}

}  // namespace logprobd
