#include "kernels/torch_ops/ranks/rank_group.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>
#include <vector>

#include "kernels/torch_ops/rows/device_ops.h"
#include "kernels/torch_ops/rows/valid_rows.h"

namespace logprobd::torch_ops {
namespace {

c10::intrusive_ptr<c10d::ProcessGroup> Resolve(const std::string& name) {
  if (name.empty()) return nullptr;
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(false, "process_group: this process has no group named \"", name,
                      "\": pass the group object itself, as made by torch.distributed");
  }
}

// Layout of the numbers of an exchange: 1 if any rank failed, else 0; the common numbers, each
// followed by its complement; RankInfo::own of each rank.
constexpr size_t kFirstOwn = 1 + 2 * RankGroup::kCommonMax;

int64_t NumNumbers(int64_t num_ranks) {
  return static_cast<int64_t>(kFirstOwn +
                              static_cast<size_t>(num_ranks) * RankGroup::Numbers().size());
}

using Buffers = RankGroup::Buffers;
using Numbers = RankGroup::Numbers;

Buffers AllocateBuffers(int64_t num_numbers, const at::Device& device) {
  Buffers buffers;
  buffers.on_host = at::empty({num_numbers},
                              at::TensorOptions().dtype(at::kLong).pinned_memory(device.is_cuda()));
  buffers.on_device = device.is_cpu()
                          ? buffers.on_host
                          : at::empty({num_numbers}, at::TensorOptions(device).dtype(at::kLong));
  return buffers;
}

/// Returns the buffers of exchanges in which this rank has no memory for others, allocated by the
/// first call for a size and a device. Exchanges may share them, because a rank without memory only
/// reports its failure, and no rank reads the other numbers then.
Buffers ReservedBuffers(int64_t num_numbers, const at::Device& device) {
  static std::mutex mutex;
  // Never destroyed, because PyTorch's allocators may be destroyed earlier.
  static auto& reserved = *new std::map<std::pair<int64_t, std::string>, Buffers>();
  const std::lock_guard lock(mutex);
  Buffers& buffers = reserved[{num_numbers, device.str()}];
  if (!buffers.on_host.defined()) buffers = AllocateBuffers(num_numbers, device);
  return buffers;
}

}  // namespace

/// Remembers this rank's passes with a group. Thread-safe.
class GroupMemory {
 public:
  /// Returns the memory of a group. A later group with the same name gets another one.
  static std::shared_ptr<GroupMemory> Of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
    struct Entry {
      WeakGroup group;
      std::shared_ptr<GroupMemory> memory;
    };
    static std::mutex mutex;
    // Never destroyed, because PyTorch's allocators may be destroyed earlier.
    static auto& entries = *new std::map<std::string, Entry>();
    const std::lock_guard lock(mutex);
    const std::string& name = group->getGroupName();
    auto found = entries.find(name);
    if (found == entries.end() || found->second.group.lock() != group) {
      Entry entry = {WeakGroup(group), std::make_shared<GroupMemory>()};
      found = entries.insert_or_assign(name, std::move(entry)).first;
    }
    return found->second.memory;
  }

  /// Appends a failure that the ranks have shared: `on_host` is not 0 after `is_ready` if any rank
  /// has failed.
  void AppendFailure(const at::Tensor& on_host, c10::Event is_ready, bool is_mine) {
    const std::lock_guard lock(mutex_);
    failures_.push_back({on_host, std::move(is_ready), is_mine});
  }

  /// Waits for the failures, forgets them and returns the first one.
  EarlierFailure TakeFailure() {
    std::vector<SharedFailure> failures;
    {
      const std::lock_guard lock(mutex_);
      failures.swap(failures_);
    }
    for (const SharedFailure& failure : failures) {
      failure.is_ready.synchronize();
      if (*failure.on_host.const_data_ptr<int64_t>() == 0) continue;
      return failure.is_mine ? EarlierFailure::kHere : EarlierFailure::kElsewhere;
    }
    return EarlierFailure::kNone;
  }

  /// Remembers the shards of the ranks, of which `rank` is this one.
  void SetShards(const std::vector<Numbers>& of_ranks, size_t rank) {
    std::vector<IdRange> shards;
    shards.reserve(of_ranks.size());
    for (const Numbers& numbers : of_ranks) shards.push_back({numbers[0], numbers[1]});
    const std::lock_guard lock(mutex_);
    const auto [found, is_new] =
        shards_.try_emplace({shards[rank].begin, shards[rank].end}, shards);
    // If the other ranks had other shards before, a graph cannot know theirs from this rank's.
    const auto is_same = [](const IdRange& a, const IdRange& b) {
      return a.begin == b.begin && a.end == b.end;
    };
    if (!std::equal(shards.begin(), shards.end(), found->second.begin(), found->second.end(),
                    is_same)) {
      found->second.clear();
    }
  }

  /// Returns the shards of the ranks where this rank has `mine`, or nothing if they are not known.
  std::vector<IdRange> ShardsWith(IdRange mine) {
    const std::lock_guard lock(mutex_);
    const auto found = shards_.find({mine.begin, mine.end});
    return found == shards_.end() ? std::vector<IdRange>() : found->second;
  }

 private:
  struct SharedFailure {
    at::Tensor on_host;
    c10::Event is_ready;
    bool is_mine;
  };

  std::mutex mutex_;
  std::vector<SharedFailure> failures_;
  std::map<std::pair<int64_t, int64_t>, std::vector<IdRange>> shards_;  // by this rank's
};

void DeferredError::Run(const std::function<void()>& step) {
  if (has_error()) return;
  try {
    step();
  } catch (...) {
    error_ = std::current_exception();
  }
}

void DeferredError::Rethrow(bool has_any_rank_failed) const {
  if (error_) std::rethrow_exception(error_);
  TORCH_CHECK(!has_any_rank_failed,
              "linear_logprob failed on another rank of the group; see the error of that rank");
}

RankGroup::RankGroup(const std::string& name) : group_(Resolve(name)) {
  if (group_ != nullptr && group_->getSize() == 1) group_.reset();
  if (group_ != nullptr) memory_ = GroupMemory::Of(group_);
}

const RankGroup& RankGroup::Alone() {
  static const RankGroup alone(/*name=*/"");
  return alone;
}

c10::intrusive_ptr<c10d::Work> RankGroup::StartReduction(
    at::Tensor& values, c10d::ReduceOp::RedOpType operation) const {
  std::vector<at::Tensor> tensors = {values};
  c10d::AllreduceOptions options;
  options.reduceOp = operation;
  return group_->allreduce(tensors, options);
}

void RankGroup::Reduce(at::Tensor& values, c10d::ReduceOp::RedOpType operation) const {
  if (is_alone()) return;
  StartReduction(values, operation)->wait();
}

void RankGroup::Max(at::Tensor& values) const { Reduce(values, c10d::ReduceOp::MAX); }
void RankGroup::Min(at::Tensor& values) const { Reduce(values, c10d::ReduceOp::MIN); }
void RankGroup::Sum(at::Tensor& values) const { Reduce(values, c10d::ReduceOp::SUM); }

at::Tensor RankGroup::Gather(const at::Tensor& rows) const {
  if (is_alone()) return rows;
  const at::Tensor mine = rows.contiguous();
  std::vector<int64_t> shape = mine.sizes().vec();
  shape.front() *= size();
  at::Tensor all = at::empty(shape, mine.options());
  GatherInto(all, mine);
  return all;
}

void RankGroup::GatherInto(at::Tensor& all, const at::Tensor& rows) const {
  group_->_allgather_base(all, const_cast<at::Tensor&>(rows))->wait();
}

RankGroup::PendingSum RankGroup::StartSum(const at::Tensor& rows, bool is_scattered) const {
  PendingSum pending;
  pending.input_ = pending.sum_ = rows.contiguous();
  pending.size_ = is_scattered ? rows.size(0) / size() : rows.size(0);
  if (is_alone()) return pending;
  if (is_scattered && group_->getBackendName() != "gloo") {
    std::vector<int64_t> shape = rows.sizes().vec();
    shape.front() = pending.size_;
    pending.sum_ = at::empty(shape, rows.options());
    pending.work_ = group_->_reduce_scatter_base(pending.sum_, pending.input_);
    return pending;
  }
  // gloo has no reduce-scatter: every rank gets the whole sum and takes its part.
  if (is_scattered) pending.begin_ = rank() * pending.size_;
  pending.work_ = StartReduction(pending.input_, c10d::ReduceOp::SUM);
  return pending;
}

at::Tensor RankGroup::PendingSum::Result() const {
  if (work_ != nullptr) work_->wait();
  return SliceRows(sum_, begin_, size_);
}

void RankGroup::RunOnAllRanks(const at::Device& device, const std::function<void()>& work) const {
  PendingInfo pending = StartExchange(device, [&] {
    work();
    return RankInfo{};
  });
  pending.Result();
}

RankGroup::Buffers RankGroup::AllocateErrorBuffers(const at::Device& device) const {
  return is_alone() || IsCapturing(device) ? Buffers() : AllocateBuffers(1, device);
}

void RankGroup::ShareError(const Buffers& buffers, const DeferredError& error) const {
  at::Tensor has_error = buffers.on_device;
  if (!has_error.defined()) return error.Rethrow(/*has_any_rank_failed=*/false);
  has_error.fill_(error.has_error() ? 1 : 0);
  Max(has_error);
  if (has_error.is_cpu()) return error.Rethrow(has_error.item<int64_t>() != 0);
  buffers.on_host.copy_(has_error, /*non_blocking=*/true);
  memory_->AppendFailure(buffers.on_host, RecordEvent(has_error.device()), error.has_error());
  error.Rethrow(/*has_any_rank_failed=*/false);
}

std::vector<RankGroup::Numbers> RankGroup::KnownShards(const Numbers& own) const {
  const std::vector<IdRange> shards = memory_->ShardsWith({own[0], own[1]});
  TORCH_CHECK_VALUE(!shards.empty(),
                    "process_group: before a CUDA graph captures a call with a group of several "
                    "ranks, make the same call once outside of the graph, in which the ranks tell "
                    "each other their parts of the vocabulary. They must be the only ones of this "
                    "group in which this rank has ids [",
                    own[0], ", ", own[1], ")");
  std::vector<Numbers> numbers;
  numbers.reserve(shards.size());
  for (const IdRange& shard : shards) numbers.push_back({shard.begin, shard.end, own[2]});
  return numbers;
}

RankGroup::PendingInfo RankGroup::StartExchange(const at::Device& device,
                                                const std::function<RankInfo()>& work) const {
  PendingInfo pending;
  if (is_alone()) {
    pending.own_ = {work().own};
    return pending;
  }
  if (IsCapturing(device)) {
    TORCH_CHECK_VALUE(group_->getBackendName() != "gloo",
                      "process_group: a CUDA graph cannot contain collectives of gloo; use nccl");
    const RankInfo mine = work();
    pending.own_ = mine.has_shard ? KnownShards(mine.own) : std::vector<Numbers>();
    return pending;
  }
  Buffers buffers = ReservedBuffers(NumNumbers(size()), device);
  pending.error_.Run([&] { buffers = AllocateBuffers(NumNumbers(size()), device); });
  pending.memory_ = memory_;
  pending.rank_ = static_cast<size_t>(rank());
  pending.max_ = buffers.on_host;
  RankInfo mine;
  pending.error_.Run([&] {
    mine = work();
    TORCH_INTERNAL_ASSERT(mine.common.size() <= kCommonMax);
  });
  // A single max all-reduce exchanges everything. The maximum of the complements is the complement
  // of the smallest number, so it matches the maximum only if all ranks have equal numbers. Each
  // rank leaves INT64_MIN where the own numbers of the other ranks go.
  auto* const numbers = pending.max_.mutable_data_ptr<int64_t>();
  std::fill_n(numbers, NumNumbers(size()), std::numeric_limits<int64_t>::min());
  numbers[0] = pending.has_error() ? 1 : 0;
  for (size_t i = 0; i < kCommonMax; ++i) {
    const int64_t value = i < mine.common.size() ? mine.common[i].value : 0;
    numbers[1 + 2 * i] = value;
    numbers[2 + 2 * i] = ~value;
  }
  pending.common_ = std::move(mine.common);
  pending.has_shards_ = mine.has_shard;
  std::copy(mine.own.begin(), mine.own.end(),
            numbers + kFirstOwn + static_cast<size_t>(rank()) * mine.own.size());
  if (device.is_cpu()) {
    Max(buffers.on_device);
    return pending;
  }
  buffers.on_device.copy_(pending.max_, /*non_blocking=*/true);
  Max(buffers.on_device);
  pending.max_.copy_(buffers.on_device, /*non_blocking=*/true);
  pending.is_ready_ = RecordEvent(device);
  return pending;
}

std::vector<RankGroup::Numbers> RankGroup::PendingInfo::Result() {
  if (!max_.defined()) return own_;
  if (is_ready_.has_value()) is_ready_->synchronize();
  const auto* const numbers = max_.const_data_ptr<int64_t>();
  if (!earlier_failure_.has_value()) earlier_failure_ = memory_->TakeFailure();
  error_.Rethrow(numbers[0] != 0);
  TORCH_CHECK(
      earlier_failure_ != EarlierFailure::kHere,
      "this rank failed in an earlier backward pass or loss of the group, whose other ranks "
      "learn of it only now");
  TORCH_CHECK(earlier_failure_ == EarlierFailure::kNone,
              "an earlier backward pass or loss of the group failed on another rank, after this "
              "rank had enqueued its part; see the error of that rank. The gradients that this "
              "rank computed are wrong");
  std::string different;
  for (size_t i = 0; i < kCommonMax; ++i) {
    if (numbers[1 + 2 * i] == ~numbers[2 + 2 * i]) continue;
    if (!different.empty()) different += ", ";
    // Ranks that call different operators have different numbers of numbers.
    different += i < common_.size() ? common_[i].name : "operator";
  }
  TORCH_CHECK_VALUE(different.empty(),
                    "the ranks of the group were called with different arguments: ", different);
  std::vector<Numbers> own_of_ranks;
  const auto* const end = numbers + max_.numel();
  for (const int64_t* own = numbers + kFirstOwn; own < end; own += Numbers().size()) {
    std::copy_n(own, Numbers().size(), own_of_ranks.emplace_back().begin());
  }
  if (has_shards_) memory_->SetShards(own_of_ranks, rank_);
  return own_of_ranks;
}

}  // namespace logprobd::torch_ops
