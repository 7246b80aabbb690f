#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/combine/exchange_mailbox.h"
#include "kernels/combine/row_scores.h"

namespace logprobd::kernels {

/// Inputs and outputs of LaunchPeerScores.
struct PeerScoresParams {
  PeerStep step;
  /// Parameters of LaunchRowScores for the tiles of this rank's shard. max_keys, min_keys and
  /// target_logits hold the values of this shard; a target_logits entry is 0 where another shard
  /// holds the target. Only rank 0 writes the outputs, including normalizers and nonfinite; on
  /// other ranks the pointers only indicate which outputs are requested. num_rows is at most
  /// kPeerScoresRowsMax, and the partials of each row are contiguous. target_rank must be null,
  /// because a mailbox has no word for it.
  RowScoresParams scores;
};

/// Enqueues one kernel per rank that does the work of LaunchShardExponents, LaunchShardSums,
/// LaunchShardScores and the exchanges between them, and returns without waiting. On rank 0,
/// max_keys, min_keys and target_logits are replaced by the values over all shards. The results are
/// bit-identical to those of LaunchRowScores over all tiles. The rules that peer_exchange.h states
/// for its launches apply.
///
/// Returns cudaErrorInvalidValue if a parameter is out of range, otherwise the error of the launch.
[[nodiscard]] cudaError_t LaunchPeerScores(const PeerScoresParams& params, cudaStream_t stream);

/// Loads the kernel on the current device, as ProbePeerExchange does.
[[nodiscard]] cudaError_t ProbePeerScores();

}  // namespace logprobd::kernels
