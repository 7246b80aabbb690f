#include "kernels/torch_ops/rank_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <vector>

#include "kernels/torch_ops/views.h"

namespace logprobd::torch_ops {
namespace {

c10::intrusive_ptr<c10d::ProcessGroup> Resolve(const std::string& name) {
  if (name.empty()) return nullptr;
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(false, "process_group: no group is called \"", name,
                      "\" in this process: pass the group itself, made by torch.distributed");
  }
}

/// Places of what ranks tell: whether one failed, common numbers and their complements, each rank's
/// own.
constexpr size_t kFirstOwn = 1 + 2 * RankGroup::kCommon;

size_t NumbersTold(int64_t num_ranks) {
  return kFirstOwn + static_cast<size_t>(num_ranks) * RankGroup::Numbers().size();
}

}  // namespace

void Attempt::operator()(const std::function<void()>& step) {
  if (has_failed()) return;
  try {
    step();
  } catch (...) {
    error_ = std::current_exception();
  }
}

void Attempt::Rethrow(bool has_any_failed) const {
  if (error_) std::rethrow_exception(error_);
  TORCH_CHECK(!has_any_failed,
              "linear_logprob failed on another rank of the group; its error says why");
}

RankGroup::RankGroup(const std::string& name) : group_(Resolve(name)) {}

c10::intrusive_ptr<c10d::Work> RankGroup::StartReduction(
    at::Tensor& values, c10d::ReduceOp::RedOpType operation) const {
  std::vector<at::Tensor> tensors = {values};
  c10d::AllreduceOptions options;
  options.reduceOp = operation;
  return group_->allreduce(tensors, options);
}

void RankGroup::Reduce(at::Tensor& values, c10d::ReduceOp::RedOpType operation) const {
  if (is_alone() || size() == 1) return;
  StartReduction(values, operation)->wait();
}

void RankGroup::Max(at::Tensor& values) const { Reduce(values, c10d::ReduceOp::MAX); }
void RankGroup::Min(at::Tensor& values) const { Reduce(values, c10d::ReduceOp::MIN); }
void RankGroup::Sum(at::Tensor& values) const { Reduce(values, c10d::ReduceOp::SUM); }

at::Tensor RankGroup::Gather(const at::Tensor& rows) const {
  if (is_alone() || size() == 1) return rows;
  const at::Tensor mine = rows.contiguous();
  std::vector<int64_t> shape = mine.sizes().vec();
  shape.front() *= size();
  at::Tensor all = at::empty(shape, mine.options());
  group_->_allgather_base(all, const_cast<at::Tensor&>(mine))->wait();
  return all;
}

RankGroup::PendingSum RankGroup::StartSum(const at::Tensor& rows, bool is_scattered) const {
  PendingSum pending;
  pending.all_ = pending.sum_ = rows.contiguous();
  pending.size_ = is_scattered ? rows.size(0) / size() : rows.size(0);
  if (is_alone() || size() == 1) return pending;
  if (is_scattered && group_->getBackendName() != "gloo") {
    std::vector<int64_t> shape = rows.sizes().vec();
    shape.front() = pending.size_;
    pending.sum_ = at::empty(shape, rows.options());
    pending.work_ = group_->_reduce_scatter_base(pending.sum_, pending.all_);
    return pending;
  }
  // gloo scatters no sums.
  if (is_scattered) pending.begin_ = rank() * pending.size_;
  pending.work_ = StartReduction(pending.all_, c10d::ReduceOp::SUM);
  return pending;
}

at::Tensor RankGroup::PendingSum::Result() const {
  if (work_ != nullptr) work_->wait();
  return RowsFrom(sum_, begin_, size_);
}

void RankGroup::Together(const at::Device& device, const std::function<void()>& work) const {
  Agree(device, [&] {
    work();
    return Claim{};
  });
}

at::Tensor RankGroup::Tell(const at::Device& device, const Attempt& attempt) const {
  at::Tensor failed = at::full({1}, attempt.has_failed() ? 1 : 0,
                               at::TensorOptions().dtype(at::kInt).device(device));
  Max(failed);
  return failed;
}

RankGroup::PendingClaims RankGroup::StartAgreement(const at::Device& device,
                                                   const std::function<Claim()>& work) const {
  PendingClaims pending;
  if (is_alone()) {
    pending.of_ranks_ = {work().own};
    return pending;
  }
  Claim mine;
  pending.attempt_([&] {
    mine = work();
    TORCH_INTERNAL_ASSERT(mine.common.size() <= kCommon);
  });
  // Everything is told by the largest number in its place: a number's complement is largest where
  // the number is smallest, and the place of a rank's own one is the smallest on all others.
  std::vector<int64_t> told(NumbersTold(size()), std::numeric_limits<int64_t>::min());
  told[0] = pending.has_failed() ? 1 : 0;
  mine.common.resize(kCommon);
  for (size_t i = 0; i < kCommon; ++i) {
    told[1 + 2 * i] = mine.common[i];
    told[2 + 2 * i] = ~mine.common[i];
  }
  std::copy(mine.own.begin(), mine.own.end(),
            told.begin() +
                static_cast<int64_t>(kFirstOwn + static_cast<size_t>(rank()) * mine.own.size()));
  // Pinned memory is copied without waiting.
  pending.largest_ =
      at::empty({static_cast<int64_t>(told.size())},
                at::TensorOptions().dtype(at::kLong).pinned_memory(device.is_cuda()));
  std::copy(told.begin(), told.end(), pending.largest_.mutable_data_ptr<int64_t>());
  if (device.is_cpu()) {
    Max(pending.largest_);
    return pending;
  }
  at::Tensor largest = pending.largest_.to(device, /*non_blocking=*/true);
  Max(largest);
  pending.largest_.copy_(largest, /*non_blocking=*/true);
  pending.is_told_.emplace(device.type());
  pending.is_told_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return pending;
}

std::vector<RankGroup::Numbers> RankGroup::PendingClaims::Result() {
  if (!largest_.defined()) return of_ranks_;
  if (is_told_.has_value()) is_told_->synchronize();
  const auto* const numbers = largest_.const_data_ptr<int64_t>();
  attempt_.Rethrow(numbers[0] != 0);
  for (size_t i = 1; i < kFirstOwn; i += 2) {
    TORCH_CHECK_VALUE(
        numbers[i] == ~numbers[i + 1],
        "the ranks of the group were called with different targets, sizes or options");
  }
  std::vector<Numbers> of_ranks;
  const auto* const end = numbers + largest_.numel();
  for (const int64_t* own = numbers + kFirstOwn; own < end; own += Numbers().size()) {
    std::copy_n(own, Numbers().size(), of_ranks.emplace_back().begin());
  }
  return of_ranks;
}

std::vector<RankGroup::Numbers> RankGroup::Agree(const at::Device& device,
                                                 const std::function<Claim()>& work) const {
  return StartAgreement(device, work).Result();
}

}  // namespace logprobd::torch_ops
