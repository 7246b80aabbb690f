#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/combine/exchange_mailbox.h"
#include "kernels/common/reduction.h"

struct CUstream_st;

namespace logprobd {

/// Where the work of a shard is enqueued: a CUDA stream, or null where work is done at once.
using ShardStream = CUstream_st*;

/// INTERNAL of the collective called `name`, which CollectiveOf finds again.
absl::Status CollectiveError(absl::string_view name, absl::string_view message);
std::optional<std::string> CollectiveOf(const absl::Status& status);

/// Joins what the shards of one engine know: InProcessCollective on a CPU, PeerCollective and
/// NcclCollective on GPUs.
///
/// All ranks make the same calls in the same order with arrays of the same sizes, each from one
/// thread at a time. A call enqueues on the rank's stream and returns; where there is none it
/// returns when the arrays are joined. All joins are exact: bits do not depend on who joins.
///
/// Errors: CollectiveError when the means of joining fails; ABORTED after Abort. Either may also
/// show later, by Check. A collective that failed once is of no further use.
class Collective {
 public:
  virtual ~Collective() = default;

  /// "peer", "nccl", "in process": for logs and metrics.
  virtual absl::string_view name() const = 0;

  /// Every item becomes the join of that item over all ranks, in place.
  virtual absl::Status AllReduce(int32_t rank, absl::Span<const kernels::Reduction> items,
                                 ShardStream stream) = 0;

  /// Brings `mine` [count] of every rank to rank 0's `all` [ranks, count], which is ignored
  /// elsewhere.
  virtual absl::Status Gather(int32_t rank, const uint64_t* mine, int64_t count, uint64_t* all,
                              ShardStream stream) = 0;

  /// Where GPUs reach each other's memory: what a kernel of the caller's own needs to exchange in
  /// the place of one call of the above.
  virtual std::optional<kernels::PeerStep> TakePeerStep(int32_t /*rank*/) { return std::nullopt; }

  /// What has failed in work that was enqueued. Any thread.
  virtual absl::Status Check() = 0;

  /// Ends all that waits for another rank, on host and device, soon and for good. Any thread.
  virtual void Abort() = 0;
};

}  // namespace logprobd
