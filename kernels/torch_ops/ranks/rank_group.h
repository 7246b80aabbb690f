#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace logprobd::torch_ops {

/// Runs the steps of one rank between collectives. When a step throws, the later steps are skipped,
/// so that the rank still takes part in the collectives that the other ranks wait for, until all
/// ranks can learn of the error.
class DeferredError {
 public:
  /// Runs `step` unless an earlier step has thrown.
  void Run(const std::function<void()>& step);

  bool has_error() const { return error_ != nullptr; }
  /// Throws this rank's error if there is one. Otherwise, if `has_any_rank_failed`, throws an error
  /// that says that another rank failed.
  void Rethrow(bool has_any_rank_failed) const;

 private:
  std::exception_ptr error_;
};

class GroupMemory;

/// Whether a rank of the group failed in an earlier pass: none, another one, or this one.
enum class EarlierFailure { kNone, kElsewhere, kHere };

/// The ranks that hold the shards of one head, or this process alone. Ranks call the functions
/// together and in the same order. The group's backend determines how collectives are enqueued. A
/// process that is alone runs no collectives.
class RankGroup {
 public:
  /// `name` is the group's name in torch.distributed (ProcessGroup.group_name). An empty name and a
  /// group of one rank make a group of this process alone. Throws c10::ValueError for an unknown
  /// name.
  explicit RankGroup(const std::string& name);

  /// Returns the group of this process alone.
  static const RankGroup& Alone();

  bool is_alone() const { return group_ == nullptr; }
  int64_t size() const { return is_alone() ? 1 : group_->getSize(); }
  int64_t rank() const { return is_alone() ? 0 : group_->getRank(); }

  /// Reduces over the ranks in place. The result has the same bits on every rank.
  void Max(at::Tensor& values) const;
  /// See Max.
  void Min(at::Tensor& values) const;
  /// See Max.
  void Sum(at::Tensor& values) const;

  /// Concatenates `rows`, [n, ...], of every rank in the order of ranks: [size * n, ...].
  at::Tensor Gather(const at::Tensor& rows) const;

  /// Like Gather, but writes to `all` and allocates nothing. `rows` and `all` are contiguous.
  void GatherInto(at::Tensor& all, const at::Tensor& rows) const;

  class PendingSum;

  /// Starts to sum `rows`, [n, ...], over the ranks; may overwrite `rows`. Work that is enqueued
  /// before the result is requested may run at the same time. With `is_scattered` each rank gets
  /// its n / size rows of the sum.
  PendingSum StartSum(const at::Tensor& rows, bool is_scattered) const;

  /// Runs `work`. When it throws on any rank, throws on every rank, so that no rank waits forever
  /// in a collective that another rank does not reach. `device` is one that the group's backend
  /// supports.
  void RunOnAllRanks(const at::Device& device, const std::function<void()>& work) const;

  /// Memory for numbers that the ranks exchange.
  struct Buffers {
    at::Tensor on_host;    ///< int64; copies from and to it do not wait.
    at::Tensor on_device;  ///< Of the same size. Is on_host itself on a CPU.
  };

  /// Returns memory for ShareError, which must not fail; undefined tensors if nothing is shared.
  Buffers AllocateErrorBuffers(const at::Device& device) const;

  /// Ends a pass: throws this rank's error if there is one, and tells the other ranks. They throw
  /// too; on a GPU, for which the host does not wait here, all ranks do so when the host waits for
  /// their next exchange (PendingInfo::Result). While a CUDA graph is captured nothing is shared.
  /// `buffers` are from AllocateErrorBuffers.
  void ShareError(const Buffers& buffers, const DeferredError& error) const;

  /// Numbers that may differ between ranks.
  using Numbers = std::array<int64_t, 3>;

  /// A number that must be equal on all ranks, and the name of the argument that it describes,
  /// which errors contain.
  struct CommonNumber {
    const char* name;  ///< Lives as long as the program.
    int64_t value;
  };

  /// The values that a rank shares with the others before a pass.
  struct RankInfo {
    std::vector<CommonNumber> common;  ///< At most kCommonMax numbers.
    Numbers own = {};
    bool has_shard = false;  ///< `own` begins with the first id of the rank's shard, and the end.
  };
  static constexpr size_t kCommonMax = 48;

  class PendingInfo;

  /// Runs `work` and starts the collective that shares its RankInfo. In a group, an error of `work`
  /// is shared too and is thrown by PendingInfo::Result; a rank that is alone throws here. So is a
  /// lack of memory for the exchange itself, except in a process's first exchange with as many
  /// ranks, in which a rank without memory throws at once and the others wait.
  ///
  /// While a CUDA graph is captured nothing is exchanged. The shards of the ranks are those of the
  /// earlier exchanges in which this rank had the same shard, and each third number is this rank's.
  /// Throws c10::ValueError if there was none, if their shards differed, or if the group's backend
  /// is gloo.
  PendingInfo StartExchange(const at::Device& device, const std::function<RankInfo()>& work) const;

 private:
  c10::intrusive_ptr<c10d::Work> StartReduction(at::Tensor& values,
                                                c10d::ReduceOp::RedOpType operation) const;
  void Reduce(at::Tensor& values, c10d::ReduceOp::RedOpType operation) const;

  /// Returns the ranks' own numbers that StartExchange uses in a CUDA graph.
  std::vector<Numbers> KnownShards(const Numbers& own) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<GroupMemory> memory_;  // null if the rank is alone
};

/// A sum over the ranks that is still running.
class RankGroup::PendingSum {
 public:
  /// Returns the sum, [n, ...], or this rank's part of it. Work that is enqueued from here on runs
  /// after the sum.
  at::Tensor Result() const;

 private:
  friend class RankGroup;

  at::Tensor input_;                     // read by the collective, so alive while it runs
  at::Tensor sum_;                       // of all rows, or of this rank's rows
  int64_t begin_ = 0;                    // first of this rank's rows in sum_
  int64_t size_ = 0;                     // number of this rank's rows
  c10::intrusive_ptr<c10d::Work> work_;  // null when the rank is alone
};

/// The RankInfo of all ranks, which arrives after this rank has sent its own.
class RankGroup::PendingInfo {
 public:
  /// Returns whether this rank's work has thrown.
  bool has_error() const { return error_.has_error(); }

  /// Waits for the collective, but not for work that was enqueued after it. Returns each rank's
  /// own numbers. May be called several times, with the same outcome. Throws on every rank when the
  /// work of any rank threw, a c10::ValueError that names the arguments when the ranks' common
  /// numbers differ, and the errors of earlier passes (ShareError).
  std::vector<Numbers> Result();

 private:
  friend class RankGroup;

  DeferredError error_;
  std::shared_ptr<GroupMemory> memory_;
  size_t rank_ = 0;
  bool has_shards_ = false;
  std::optional<EarlierFailure> earlier_failure_;  // absent: not read yet
  std::vector<CommonNumber> common_;               // of this rank
  std::vector<Numbers> own_;                       // result if nothing is exchanged
  at::Tensor max_;                      // result of the collective, on the host; else undefined
  std::optional<c10::Event> is_ready_;  // absent: max_ is ready already
};

}  // namespace logprobd::torch_ops
