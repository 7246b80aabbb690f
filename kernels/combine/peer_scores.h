#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/combine/exchange_mailbox.h"
#include "kernels/combine/row_scores.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchPeerScores.
struct PeerScoresParams {
  PeerStep step;
  /// As LaunchRowScores takes it, for the tiles of this rank's shard. max_keys, min_keys and
  /// target_logits are what this shard knows: target_logits are 0 where another one holds the
  /// target. The outputs, normalizers and nonfinite too, are rank 0's; elsewhere they only say what
  /// is asked. At most kPeerScoresRowsMax rows, a row's partials next to each other.
  RowScoresParams scores;
};

/// Enqueues, on every rank together, what LaunchShardExponents, LaunchShardSums, LaunchShardScores
/// and the exchanges between them do, in one kernel through peer memory, and returns without
/// waiting. Rank 0's max_keys, min_keys and target_logits become those of all shards. The bits are
/// LaunchRowScores's over all tiles. Otherwise as peer_exchange.h says of its launches.
///
/// cudaErrorInvalidValue when a bound is broken, else the launch's own error.
[[nodiscard]] cudaError_t LaunchPeerScores(const PeerScoresParams& params, cudaStream_t stream);

/// Loads the kernel on the current device: see ProbePeerExchange.
[[nodiscard]] cudaError_t ProbePeerScores();

}  // namespace logprobd::kernels
