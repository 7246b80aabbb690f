#pragma once

#include <vector>

#include "server/engine/collective.h"
#include "server/engine/rendezvous.h"

namespace logprobd {

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
  void Abort() override { meeting_.Break(); }

 private:
  /// What a rank has shown to the others.
  struct Shown {
    absl::Span<const kernels::Reduction> items;
    const uint64_t* gathered = nullptr;
  };

  /// Waits for all ranks; ABORTED once it is of no use.
  absl::Status Meet();

  Rendezvous meeting_;
  std::vector<Shown> shown_;  ///< [ranks]; read by others only between two meetings.
};

}  // namespace logprobd
