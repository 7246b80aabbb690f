#include "server/engine/in_process_collective.h"

#include <algorithm>

#include "server/base/errors.h"

namespace logprobd {
namespace {

using kernels::Reduction;
using kernels::ReductionType;

/// Joins elements [begin, end) of the same item of all ranks, into all of them.
template <typename T, typename Operation>
void Join(const std::vector<Reduction>& ranks, int64_t begin, int64_t end, const Operation& join) {
  for (int64_t i = begin; i < end; ++i) {
    T value = static_cast<const T*>(ranks.front().values)[i];
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      value = join(value, static_cast<const T*>(ranks[rank].values)[i]);
    }
    for (const Reduction& item : ranks) static_cast<T*>(item.values)[i] = value;
  }
}

void Join(const std::vector<Reduction>& ranks, int64_t begin, int64_t end) {
  const auto larger = [](auto a, auto b) { return std::max(a, b); };
  // Unsigned sums wrap, as the bits of a float that one rank has and the others' zeros must.
  const auto sum = [](auto a, auto b) { return a + b; };
  switch (ranks.front().type) {
    case ReductionType::kMaxInt32:
      return Join<int32_t>(ranks, begin, end, larger);
    case ReductionType::kMaxUint32:
      return Join<uint32_t>(ranks, begin, end, larger);
    case ReductionType::kMaxUint64:
      return Join<uint64_t>(ranks, begin, end, larger);
    case ReductionType::kSumInt32:
      return Join<uint32_t>(ranks, begin, end, sum);
    case ReductionType::kSumInt64:
      return Join<uint64_t>(ranks, begin, end, sum);
  }
}

}  // namespace

InProcessCollective::InProcessCollective(int32_t num_ranks)
    : meeting_(num_ranks), shown_(static_cast<size_t>(num_ranks)) {}

absl::Status InProcessCollective::Meet() {
  return meeting_.Meet() ? absl::OkStatus() : absl::AbortedError("the shards were told to stop");
}

absl::Status InProcessCollective::AllReduce(int32_t rank, absl::Span<const Reduction> items,
                                            ShardStream /*stream*/) {
  shown_[static_cast<size_t>(rank)].items = items;
  LOGPROBD_RETURN_IF_ERROR(Meet());
  const auto num_ranks = static_cast<int64_t>(shown_.size());
  for (size_t i = 0; i < items.size(); ++i) {
    std::vector<Reduction> ranks;
    for (const Shown& shown : shown_) {
      LOGPROBD_CHECK(shown.items.size() == items.size() && shown.items[i].count == items[i].count &&
                     shown.items[i].type == items[i].type);
      ranks.push_back(shown.items[i]);
    }
    // Each rank joins its part of the elements.
    Join(ranks, items[i].count * rank / num_ranks, items[i].count * (rank + 1) / num_ranks);
  }
  return Meet();
}

absl::Status InProcessCollective::Gather(int32_t rank, const uint64_t* mine, int64_t count,
                                         uint64_t* all, ShardStream /*stream*/) {
  shown_[static_cast<size_t>(rank)].gathered = mine;
  LOGPROBD_RETURN_IF_ERROR(Meet());
  if (rank == 0) {
    for (const Shown& shown : shown_) all = std::copy_n(shown.gathered, count, all);
  }
  return Meet();
}

}  // namespace logprobd
