#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/combine/exchange_mailbox.h"
#include "kernels/common/reduction.h"

struct CUstream_st;

namespace logprobd {

/// The CUDA stream on which a shard enqueues its work; null on a CPU, where work runs at once.
using ShardStream = CUstream_st*;

/// Returns an INTERNAL error of the collective called `name`.
absl::Status CollectiveError(absl::string_view name, absl::string_view message);
/// Returns the name of the collective from a CollectiveError, or nullopt for any other status.
std::optional<std::string> CollectiveOf(const absl::Status& status);

/// Reduces integer arrays over the shards of one engine: InProcessCollective on a CPU,
/// PeerCollective and NcclCollective on GPUs.
///
/// All ranks make the same calls in the same order with arrays of the same sizes, each rank from
/// one thread at a time. A call enqueues on the rank's stream and returns; without a stream it
/// returns when the arrays are reduced. All reductions are exact, so bits do not depend on the
/// ranks' order.
///
/// Errors: CollectiveError when an exchange fails, ABORTED after Abort. Check may report either one
/// later. A collective that has failed once stays unusable.
class Collective {
 public:
  virtual ~Collective() = default;

  /// "peer", "nccl" or "in process", for logs and metrics.
  virtual absl::string_view name() const = 0;

  /// Reduces each item over all ranks, in place.
  virtual absl::Status AllReduce(int32_t rank, absl::Span<const kernels::Reduction> items,
                                 ShardStream stream) = 0;

  /// Copies `mine` [count] of every rank to `all` [num_ranks, count] of rank 0. Other ranks' `all`
  /// is ignored.
  virtual absl::Status Gather(int32_t rank, const uint64_t* mine, int64_t count, uint64_t* all,
                              ShardStream stream) = 0;

  /// Returns the mailboxes and the epoch with which a kernel of the caller exchanges data itself,
  /// in place of one call to AllReduce or Gather. Returns nullopt unless the collective uses peer
  /// memory.
  virtual std::optional<kernels::PeerStep> TakePeerStep(int32_t /*rank*/) { return std::nullopt; }

  /// Returns the first failure of work that was enqueued. May be called from any thread.
  virtual absl::Status Check() = 0;

  /// Ends all present and future waits for another rank, on host and device. May be called from any
  /// thread.
  virtual void Abort() = 0;
};

/// A reusable barrier for a fixed number of threads. Thread-safe.
class Rendezvous {
 public:
  /// `size` >= 1.
  explicit Rendezvous(int32_t size) : size_(size) {}

  /// Blocks until all threads have arrived. Returns false once the barrier is broken.
  bool Meet();

  /// Releases all threads that wait now or will wait later.
  void Break();

 private:
  const int32_t size_;
  std::atomic<int32_t> arrived_ = 0;
  std::atomic<uint32_t> round_ = 0;
  std::atomic<bool> is_broken_ = false;
};

/// A Collective of threads that share memory: the shards of a CPU engine. Calls block until all
/// ranks have made them.
class InProcessCollective final : public Collective {
 public:
  explicit InProcessCollective(int32_t num_ranks);

  absl::string_view name() const override { return "in process"; }
  absl::Status AllReduce(int32_t rank, absl::Span<const kernels::Reduction> items,
                         ShardStream stream) override;
  absl::Status Gather(int32_t rank, const uint64_t* mine, int64_t count, uint64_t* all,
                      ShardStream stream) override;
  absl::Status Check() override { return absl::OkStatus(); }
  void Abort() override { barrier_.Break(); }

 private:
  /// The arrays that a rank passed to the current call.
  struct Arrays {
    absl::Span<const kernels::Reduction> items;
    const uint64_t* gathered = nullptr;
  };

  /// Waits for all ranks. Returns ABORTED after Abort.
  absl::Status Meet();

  Rendezvous barrier_;
  /// [num_ranks]; other ranks read them only between two calls of Meet.
  std::vector<Arrays> arrays_;
};

}  // namespace logprobd
