#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/collective.h"

namespace logprobd::testing {

/// A Collective that forwards to a real one until the n-th call of one rank fails or hangs.
class FaultyCollective final : public Collective {
 public:
  enum class Fault {
    kFails,    ///< The call returns INTERNAL.
    kHangs,    ///< The call returns only after Abort, as if the rank never arrived.
    kIsLater,  ///< The call succeeds, but Check fails from then on.
  };

  FaultyCollective(std::unique_ptr<Collective> real, Fault fault, int32_t rank, int call)
      : real_(std::move(real)), fault_(fault), rank_(rank), call_(call) {}

  absl::string_view name() const override { return "faulty"; }

  absl::Status AllReduce(int32_t rank, absl::Span<const kernels::Reduction> items,
                         ShardStream stream) override {
    const absl::Status status = MaybeFail(rank);
    return status.ok() ? real_->AllReduce(rank, items, stream) : status;
  }

  absl::Status Gather(int32_t rank, const uint64_t* mine, int64_t count, uint64_t* all,
                      ShardStream stream) override {
    const absl::Status status = MaybeFail(rank);
    return status.ok() ? real_->Gather(rank, mine, count, all, stream) : status;
  }

  absl::Status Check() override {
    const absl::MutexLock lock(&mutex_);
    return check_fails_ ? Broken() : real_->Check();
  }

  void Abort() override {
    {
      const absl::MutexLock lock(&mutex_);
      is_aborted_ = true;
    }
    real_->Abort();
  }

 private:
  static absl::Status Broken() {
    return CollectiveError("faulty", "a link between the shards broke");
  }

  absl::Status MaybeFail(int32_t rank) {
    if (rank != rank_) return absl::OkStatus();
    const absl::MutexLock lock(&mutex_);
    if (calls_++ != call_) return absl::OkStatus();
    switch (fault_) {
      case Fault::kFails:
        return Broken();
      case Fault::kHangs:
        mutex_.Await(absl::Condition(&is_aborted_));
        return absl::AbortedError("the exchange between shards was aborted");
      case Fault::kIsLater:
        check_fails_ = true;
    }
    return absl::OkStatus();
  }

  const std::unique_ptr<Collective> real_;
  const Fault fault_;
  const int32_t rank_;
  const int call_;  ///< Index of the call that fails, from 0.
  absl::Mutex mutex_;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_aborted_ ABSL_GUARDED_BY(mutex_) = false;
  bool check_fails_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace logprobd::testing
