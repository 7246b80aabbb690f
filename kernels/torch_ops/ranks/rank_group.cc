#include "kernels/torch_ops/ranks/rank_group.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>
#include <vector>

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

/// The numbers of an exchange on the host, from and to which copies do not wait, and on the device.
struct ExchangeBuffers {
  at::Tensor on_host;
  at::Tensor on_device;  ///< Is on_host itself on a CPU.
};

ExchangeBuffers AllocateExchange(int64_t num_numbers, const at::Device& device) {
  ExchangeBuffers buffers;
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
ExchangeBuffers ReservedExchange(int64_t num_numbers, const at::Device& device) {
  static std::mutex mutex;
  // Never destroyed, because PyTorch's allocators may be destroyed earlier.
  static auto& reserved = *new std::map<std::pair<int64_t, std::string>, ExchangeBuffers>();
  const std::lock_guard lock(mutex);
  ExchangeBuffers& buffers = reserved[{num_numbers, device.str()}];
  if (!buffers.on_host.defined()) buffers = AllocateExchange(num_numbers, device);
  return buffers;
}

}  // namespace

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

void RankGroup::ShareError(at::Tensor& has_error, const DeferredError& error) const {
  has_error.fill_(error.has_error() ? 1 : 0);
  Max(has_error);
}

RankGroup::PendingInfo RankGroup::StartExchange(const at::Device& device,
                                                const std::function<RankInfo()>& work) const {
  PendingInfo pending;
  if (is_alone()) {
    pending.own_ = {work().own};
    return pending;
  }
  ExchangeBuffers buffers = ReservedExchange(NumNumbers(size()), device);
  pending.error_.Run([&] { buffers = AllocateExchange(NumNumbers(size()), device); });
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
  std::copy(mine.own.begin(), mine.own.end(),
            numbers + kFirstOwn + static_cast<size_t>(rank()) * mine.own.size());
  if (device.is_cpu()) {
    Max(buffers.on_device);
    return pending;
  }
  buffers.on_device.copy_(pending.max_, /*non_blocking=*/true);
  Max(buffers.on_device);
  pending.max_.copy_(buffers.on_device, /*non_blocking=*/true);
  pending.is_ready_.emplace(device.type());
  pending.is_ready_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return pending;
}

std::vector<RankGroup::Numbers> RankGroup::PendingInfo::Result() {
  if (!max_.defined()) return own_;
  if (is_ready_.has_value()) is_ready_->synchronize();
  const auto* const numbers = max_.const_data_ptr<int64_t>();
  error_.Rethrow(numbers[0] != 0);
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
  return own_of_ranks;
}

}  // namespace logprobd::torch_ops
