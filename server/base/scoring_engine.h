#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"
#include "server/base/outputs.h"

namespace logprobd {

/// Memory from which an engine reads a batch's hidden rows: pinned where a GPU copies from it.
class StagingBuffer {
 public:
  virtual ~StagingBuffer() = default;
  virtual std::byte* data() = 0;
  virtual int64_t size_bytes() const = 0;
};

/// Consecutive rows of a batch in one piece of memory.
struct HiddenRun {
  const std::byte* data = nullptr;  ///< [num_rows, hidden_size]
  int64_t num_rows = 0;
  int32_t gpu = -1;  ///< CUDA ordinal of the GPU whose memory it is; -1: the host's.
};

/// Rows to score in one call and where their scores go. All memory is the caller's and stays valid
/// until `done`. Every row is to be scored (ignored rows never reach an engine), ids are in range.
///
/// Invariance: what a row gets depends on that row alone, bit for bit, not on the other rows, their
/// order or the outputs asked beside it.
struct ScoreBatch : ScoreSpans {
  Dtype dtype = Dtype::kBf16;         ///< Of `hidden`.
  int64_t num_rows = 0;               ///< 1 to batch_rows_max.
  const std::byte* hidden = nullptr;  ///< [num_rows, hidden_size], start of a StagingBuffer.
  /// Instead of `hidden`, for engines that read rows in place: where they lie, in their order. Runs
  /// may point into `hidden`'s buffer, into pinned host memory or into a GPU's.
  absl::Span<const HiddenRun> runs;
  absl::Span<const int32_t> targets;             ///< [num_rows]
  absl::Span<const float> temperatures;          ///< [num_rows]
  absl::Span<const float> entropy_temperatures;  ///< [num_rows], or empty: as `temperatures`.
  OutputSet outputs;                             ///< Union over the rows.
  int32_t top_k = 0;                             ///< Largest of any row.
  absl::Span<const int32_t> candidate_rows;  ///< [num_candidates], row in this batch, ascending.
  absl::Span<const int32_t> candidate_ids;   ///< [num_candidates]

  /// [num_rows], always filled: 1 for a row whose logits hold NaN or +Inf, or only -Inf. Such a row
  /// gets NaN scores and ids of -1.
  absl::Span<uint8_t> nonfinite;

  /// Seconds, filled by the engine; 0 where a stage does not exist.
  double h2d_seconds = 0;     ///< Until a device has all rows: gather_seconds too.
  double gather_seconds = 0;  ///< Rows that shards bring to each other.
  double kernel_seconds = 0;
  double combine_seconds = 0;
  double d2h_seconds = 0;
};

/// Called once when a batch's scores lie in place or it failed; must not block.
using ScoreDone = absl::AnyInvocable<void(absl::Status) &&>;

/// Scores batches on one replica: a ShardedEngine, or FakeEngine in tests.
///
/// Threads: Start from one thread at a time; the rest from any. At most kBatchesInFlight batches
/// are between Start and `done`; batches end in the order in which they were started. The
/// destructor waits for the batches in flight.
class ScoringEngine {
 public:
  static constexpr int kBatchesInFlight = 2;

  virtual ~ScoringEngine() = default;

  /// The facts an engine knows: sizes, dtype, transforms, its own name.
  virtual const HeadInfo& info() const = 0;

  /// Most rows of a batch; fixed at creation.
  virtual int64_t batch_rows_max() const = 0;

  /// Memory reserved at creation, staging of AllocateStaging not included.
  virtual MemoryPlan memory() const = 0;

  /// RESOURCE_EXHAUSTED when the memory is not there.
  virtual absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) = 0;

  /// Begins to score `batch` and returns; `done` is called once, on the engine's thread. Errors,
  /// given to `done`:
  ///   RESOURCE_EXHAUSTED  the batch does not fit in device memory; the engine stays usable.
  ///   INTERNAL            a device fault; healthy() is false from now on.
  ///   UNAVAILABLE         it took too long, and healthy() is false from now on; or it was not.
  virtual void Start(ScoreBatch& batch, ScoreDone done) = 0;

  virtual bool healthy() const = 0;

  /// Whether batches may have `runs`: rows in pinned host memory and in the memory of GPUs that
  /// this engine's reach. False: all rows must be staged.
  virtual bool reads_in_place() const { return false; }

  /// Rows that are computed together in a batch of `num_rows`, >= 1: those beyond a multiple take
  /// as long as a whole step of them.
  virtual int64_t row_step(int64_t /*num_rows*/) const { return 1; }
};

}  // namespace logprobd
