#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace logprobd::torch_ops {

/// Steps of one rank beside collectives that the others wait in: after one that throws, the next
/// are left out and the collectives go on, until all ranks can be told.
class Attempt {
 public:
  void operator()(const std::function<void()>& step);

  bool has_failed() const { return error_ != nullptr; }
  /// Throws this rank's error, or one that says that another's step threw, if `has_any_failed`.
  void Rethrow(bool has_any_failed) const;

 private:
  std::exception_ptr error_;
};

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

  /// A sum over the ranks that is under way.
  class PendingSum;

  /// Starts that of `rows` [n, ...], which may be changed; what is enqueued before its result is
  /// asked for may run beside it. `is_scattered`: of the sum each rank wants its part, of n / size
  /// rows.
  PendingSum StartSum(const at::Tensor& rows, bool is_scattered) const;

  /// Does `work`; where it throws on any rank, throws on every one, so that none waits for ever in
  /// a collective that another does not reach. `device` is the one that the group's backend serves.
  void Together(const at::Device& device, const std::function<void()>& work) const;

  /// int32 [1] on `device`: above 0 if the attempt has failed on any rank. Not waited for.
  at::Tensor Tell(const at::Device& device, const Attempt& attempt) const;

  /// Numbers of one rank.
  using Numbers = std::array<int64_t, 3>;

  /// What ranks tell each other: at most kCommon numbers that must be the same on all, and some
  /// that are each rank's own.
  struct Claim {
    std::vector<int64_t> common;
    Numbers own = {};
  };
  static constexpr size_t kCommon = 32;

  /// What the ranks' claims have come to, known to this rank later than it told its own.
  class PendingClaims;

  /// Does `work` and starts the collective of Together, by which ranks tell their claims. What
  /// `work` throws is told, and thrown by the result; of a rank that is alone, here.
  PendingClaims StartAgreement(const at::Device& device, const std::function<Claim()>& work) const;

  /// As Together, by the same collective: throws c10::ValueError on every rank unless the claims of
  /// all have `common` in common, and returns what each rank's own numbers are.
  std::vector<Numbers> Agree(const at::Device& device, const std::function<Claim()>& work) const;

 private:
  c10::intrusive_ptr<c10d::Work> StartReduction(at::Tensor& values,
                                                c10d::ReduceOp::RedOpType operation) const;
  void Reduce(at::Tensor& values, c10d::ReduceOp::RedOpType operation) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

class RankGroup::PendingSum {
 public:
  /// [n, ...], or this rank's part. What is enqueued from here on runs behind the sum.
  at::Tensor Result() const;

 private:
  friend class RankGroup;

  at::Tensor all_;     // what the collective takes, alive while it runs
  at::Tensor sum_;     // of all rows, or of some
  int64_t begin_ = 0;  // of this rank's part in `sum_`, and its size
  int64_t size_ = 0;
  c10::intrusive_ptr<c10d::Work> work_;  // null: alone
};

class RankGroup::PendingClaims {
 public:
  /// Whether this rank's work has thrown.
  bool has_failed() const { return attempt_.has_failed(); }

  /// Waits for the collective, and not for what was enqueued behind it; as Agree.
  std::vector<Numbers> Result();

 private:
  friend class RankGroup;

  Attempt attempt_;
  std::vector<Numbers> of_ranks_;      // of a rank that is alone
  at::Tensor largest_;                 // of the host; undefined: alone
  std::optional<c10::Event> is_told_;  // absent: it need not be waited for
};

}  // namespace logprobd::torch_ops
