#include "kernels/torch_ops/rank_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <exception>
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

void RankGroup::CheckSame(const at::Device& device, const std::vector<int64_t>& values) const {
  if (is_alone()) return;
  const at::Tensor mine = at::tensor(values, at::kLong).to(device);
  at::Tensor bounds = at::stack({mine, -mine});
  Max(bounds);
  TORCH_CHECK_VALUE((bounds[0] + bounds[1]).eq(0).all().item<bool>(),
                    "the ranks of the group were called with different targets, sizes or options");
}

void RankGroup::Together(const at::Device& device, const std::function<void()>& work) const {
  if (is_alone()) return work();
  std::exception_ptr error;
  try {
    work();
  } catch (...) {
    error = std::current_exception();
  }
  at::Tensor failed =
      at::full({1}, error ? 1 : 0, at::TensorOptions().dtype(at::kInt).device(device));
  Max(failed);
  const bool any = failed.item<int>() != 0;
  if (error) std::rethrow_exception(error);
  TORCH_CHECK(!any, "linear_logprob failed on another rank of the group; its error says why");
}

}  // namespace logprobd::torch_ops
