#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace logprobd::torch_ops {

/// The ranks that hold the shards of one head, or this process alone. Ranks call its functions
/// together, in the same order; the work is enqueued as the group's backend does it.
class RankGroup {
 public:
  /// `name` as torch.distributed knows it (ProcessGroup.group_name); empty: alone. Throws
  /// c10::ValueError for a name that is unknown.
  explicit RankGroup(const std::string& name);

  bool is_alone() const { return group_ == nullptr; }
  int64_t size() const { return is_alone() ? 1 : group_->getSize(); }
  int64_t rank() const { return is_alone() ? 0 : group_->getRank(); }

  /// In place; the result has the same bits on every rank.
  void Max(at::Tensor& values) const;
  void Min(at::Tensor& values) const;
  void Sum(at::Tensor& values) const;

  /// `rows` [n, ...] of every rank, in their order: [size * n, ...].
  at::Tensor Gather(const at::Tensor& rows) const;
  /// This rank's part, [n / size, ...], of the sum over the ranks of `rows` [n, ...].
  at::Tensor SumScattered(const at::Tensor& rows) const;

  /// Throws c10::ValueError on every rank unless all give the same values, of one length.
  void CheckSame(const at::Device& device, const std::vector<int64_t>& values) const;

  /// Does `work`; where it throws on any rank, throws on every one, so that none waits for ever in
  /// a collective that another does not reach. `device` is the one that the group's backend serves.
  void Together(const at::Device& device, const std::function<void()>& work) const;

 private:
  void Reduce(at::Tensor& values, c10d::ReduceOp::RedOpType operation) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace logprobd::torch_ops
