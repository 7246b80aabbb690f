#pragma once

#include <cstdint>
#include <memory>

#include "kernels/torch_ops/linear_logprob.h"
#include "kernels/torch_ops/row_scores.h"
#include "kernels/torch_ops/rows.h"
#include "kernels/torch_ops/shard.h"

namespace logprobd::torch_ops {

/// Whether this build has the fused kernels.
bool HasFusedKernels();

/// Whether BeginFusedScores gives all that is asked of these inputs. Throws c10::ValueError where
/// what is to be kept is what it alone gives, and it does not.
bool IsForwardFused(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options);

/// Most rows that are computed while the host does not know yet which of them are to be: they are
/// gathered even where all are, which beyond costs more than the wait.
inline constexpr int64_t kSearchedRowsMax = 4'096;

/// Whether BeginFusedScores takes the rows of `inputs` from a search that has not ended.
bool AreScoredWhileSearched(const LinearLogprobInputs& inputs, const LinearLogprobOptions& options);

/// Most rows that are scored at a time: their partials take 16 bytes a tile.
inline constexpr int64_t kFusedBlockRows = 8'192;
static_assert(kSearchedRowsMax <= kFusedBlockRows, "rows of a search are one block");

/// Takes the memory of a block of so many rows and gives it back to Torch's allocator, where
/// BeginFusedScores finds it: what is missing is known before ranks wait for each other.
void ReserveFusedRoom(int64_t num_rows, const LinearLogprobInputs& inputs,
                      const LinearLogprobOptions& options);

/// Enqueues the partials of a block of rows by the fused kernels: logits are nowhere in memory, but
/// for what `cache`, these rows of one (of exponentials) or undefined, keeps of them. Of rows of a
/// search, those that it finds. The scores are fp32, argmax int64. `inputs` and `options` outlive
/// what is begun.
std::unique_ptr<PendingScores> BeginFusedScores(const Rows& rows, const LinearLogprobInputs& inputs,
                                                const LinearLogprobOptions& options,
                                                const Shard& shard, const at::Tensor& cache);

}  // namespace logprobd::torch_ops
