#include "kernels/torch_ops/rank_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <vector>

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

void RankGroup::Reduce(at::Tensor& values, c10d::ReduceOp::RedOpType operation) const {
  if (is_alone() || size() == 1) return;
  std::vector<at::Tensor> tensors = {values};
  c10d::AllreduceOptions options;
  options.reduceOp = operation;
  group_->allreduce(tensors, options)->wait();
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

at::Tensor RankGroup::SumScattered(const at::Tensor& rows) const {
  if (is_alone() || size() == 1) return rows;
  const int64_t part = rows.size(0) / size();
  at::Tensor all = rows.contiguous();
  if (group_->getBackendName() != "gloo") {
    std::vector<int64_t> shape = all.sizes().vec();
    shape.front() = part;
    at::Tensor mine = at::empty(shape, all.options());
    group_->_reduce_scatter_base(mine, all)->wait();
    return mine;
  }
  Sum(all);  // gloo scatters no sums
  return all.narrow(0, rank() * part, part).clone();
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

std::vector<RankGroup::Numbers> RankGroup::Agree(const at::Device& device,
                                                 const std::function<Claim()>& work) const {
  if (is_alone()) return {work().own};
  Claim mine;
  Attempt attempt;
  attempt([&] {
    mine = work();
    TORCH_INTERNAL_ASSERT(mine.common.size() <= kCommon);
  });
  // Everything is told by the largest number in its place: a number's complement is largest where
  // the number is smallest, and the place of a rank's own one is the smallest on all others.
  std::vector<int64_t> told = {attempt.has_failed() ? 1 : 0};
  mine.common.resize(kCommon);
  for (const int64_t number : mine.common) {
    told.push_back(number);
    told.push_back(~number);
  }
  const size_t first_own = told.size();
  told.resize(first_own + static_cast<size_t>(size()) * mine.own.size(),
              std::numeric_limits<int64_t>::min());
  std::copy(mine.own.begin(), mine.own.end(),
            told.begin() +
                static_cast<int64_t>(first_own + static_cast<size_t>(rank()) * mine.own.size()));
  at::Tensor largest = at::tensor(told, at::kLong).to(device);
  Max(largest);
  const at::Tensor found = largest.cpu();
  const auto* const numbers = found.const_data_ptr<int64_t>();
  attempt.Rethrow(numbers[0] != 0);
  for (size_t i = 1; i < first_own; i += 2) {
    TORCH_CHECK_VALUE(
        numbers[i] == ~numbers[i + 1],
        "the ranks of the group were called with different targets, sizes or options");
  }
  std::vector<Numbers> of_ranks(static_cast<size_t>(size()));
  const int64_t* own = numbers + first_own;
  for (Numbers& of_rank : of_ranks) {
    std::copy_n(own, of_rank.size(), of_rank.begin());
    own += of_rank.size();
  }
  return of_ranks;
}

}  // namespace logprobd::torch_ops
