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

/// Memory from which an engine reads a batch's hidden rows. It is pinned if a GPU copies from it.
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
  int32_t gpu = -1;  ///< CUDA ordinal of the GPU that holds the memory; -1 for host memory.
};

/// Rows to score in one call, and the memory for their scores. All memory belongs to the caller and
/// stays valid until `done` is called. Every row is scored (ignored rows never reach an engine),
/// and all ids are in range. The engine fills the columns of ScoreSpans for which
/// OutputColumn::IsScored(outputs) is true; other spans may be empty and are not changed.
///
/// Invariance: the bits of a row's scores depend on that row alone, not on the other rows, their
/// order or the other outputs of the batch.
struct ScoreBatch : ScoreSpans {
  Dtype dtype = Dtype::kBf16;         ///< Element type of `hidden`.
  int64_t num_rows = 0;               ///< Number of rows, from 1 to batch_rows_max.
  const std::byte* hidden = nullptr;  ///< [num_rows, hidden_size], the start of a StagingBuffer.
  /// Memory of all rows, in order, which replaces `hidden` for engines that read rows in place.
  /// Runs may point into `hidden`'s buffer, into pinned host memory or into a GPU's memory.
  absl::Span<const HiddenRun> runs;
  absl::Span<const int32_t> targets;             ///< [num_rows]
  absl::Span<const float> temperatures;          ///< [num_rows]
  absl::Span<const float> entropy_temperatures;  ///< [num_rows]; empty means `temperatures`.
  OutputSet outputs;                             ///< Union of the outputs of all rows.
  int32_t top_k = 0;                             ///< Largest top_k of any row.
  absl::Span<const int32_t> candidate_rows;  ///< [num_candidates], ascending rows of this batch.
  absl::Span<const int32_t> candidate_ids;   ///< [num_candidates]

  /// [num_rows], always filled: 1 for a row whose logits hold NaN or +Inf, or only -Inf. Such a row
  /// gets NaN scores and ids of -1.
  absl::Span<uint8_t> nonfinite;

  // The engine sets these times in seconds. A time is 0 if its stage does not exist.
  double h2d_seconds = 0;     ///< Time until a device has all rows, including gather_seconds.
  double gather_seconds = 0;  ///< Time to exchange rows between shards.
  double kernel_seconds = 0;
  double combine_seconds = 0;
  double d2h_seconds = 0;
};

/// Receives the status of a batch once its scores are written or the batch has failed. It is called
/// once and must not block.
using ScoreDone = absl::AnyInvocable<void(absl::Status) &&>;

/// Default maximum number of rows in a batch, which sizes the queue's batches and the engine's
/// buffers.
inline constexpr int64_t kDefaultBatchRowsMax = 8'192;

/// Scores batches on one replica. ShardedEngine implements it, and FakeEngine does so in tests.
///
/// Threads: Start must be called by one thread at a time; the other methods may be called from any
/// thread. At most kBatchesInFlight batches may be between Start and `done`. Batches end in the
/// order in which they were started. The destructor waits for the batches in flight.
class ScoringEngine {
 public:
  static constexpr int kBatchesInFlight = 2;

  virtual ~ScoringEngine() = default;

  /// Returns what the engine knows about the head: sizes, dtype, transforms and the engine's name.
  virtual const HeadInfo& info() const = 0;

  /// Returns the maximum number of rows of a batch, which is fixed at creation.
  virtual int64_t batch_rows_max() const = 0;

  /// Returns the memory that was reserved at creation, without the memory of AllocateStaging.
  virtual MemoryPlan memory() const = 0;

  /// Allocates staging memory for Start. Returns RESOURCE_EXHAUSTED if there is not enough memory.
  virtual absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) = 0;

  /// Starts to score `batch` and returns. The engine calls `done` once, on its own thread. If the
  /// batch fails, `done` receives one of these errors:
  ///   - RESOURCE_EXHAUSTED: the batch does not fit in device memory; the engine stays usable.
  ///   - INTERNAL: a device failed; healthy() is false from now on.
  ///   - UNAVAILABLE: the engine is not healthy, or the batch took too long; healthy() is false
  ///     from now on.
  virtual void Start(ScoreBatch& batch, ScoreDone done) = 0;

  virtual bool healthy() const = 0;

  /// Returns whether batches may have `runs`, which are rows in pinned host memory or in the memory
  /// of GPUs that this engine's GPUs can access. If false, all rows must be staged.
  virtual bool reads_in_place() const { return false; }

  /// Returns the number of rows, >= 1, whose multiples the engine computes efficiently near a batch
  /// of `num_rows` rows. An incomplete last step may take as long as a full one.
  virtual int64_t row_step(int64_t /*num_rows*/) const { return 1; }
};

}  // namespace logprobd
