#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "server/base/scoring_engine.h"

namespace logprobd::testing {

/// The scores that FakeEngine gives a row. They depend only on the row's bytes, target and
/// temperatures, so that a test detects a score of a wrong row. They are not those of any real
/// head.
struct FakeScores {
  float logprob = 0;  ///< In (-16, 0).
  float entropy = 0;
  float lse = 0;
  int32_t argmax_id = 0;  ///< First two bytes of the row, little endian, modulo vocab_size.
  float argmax_logprob = 0;
  float sum_p_squared = 0;
  float max_logit = 0;
  float min_logit = 0;
  int32_t target_rank = 0;
  bool nonfinite = false;  ///< True if the row contains NaN or Inf. Scores are then NaN, ids -1.
};

FakeScores FakeScoresOf(absl::Span<const std::byte> row, Dtype dtype, int32_t target,
                        float temperature, float entropy_temperature, int64_t vocab_size);

/// Returns entry `rank` (from 0) of a row's top-k list: (argmax_id + rank) modulo `vocab_size`.
int32_t FakeTopKId(const FakeScores& scores, int32_t rank, int64_t vocab_size);
float FakeTopKLogprob(const FakeScores& scores, int32_t rank);
float FakeCandidateLogprob(const FakeScores& scores, int32_t id);

/// A copy of a batch that FakeEngine received.
struct RecordedBatch {
  Dtype dtype = Dtype::kBf16;
  int64_t num_rows = 0;
  std::vector<std::byte> hidden;  ///< All rows, including those that were in runs.
  std::vector<HiddenRun> runs;
  std::vector<int32_t> targets;
  std::vector<float> temperatures;
  std::vector<float> entropy_temperatures;
  OutputSet outputs;
  int32_t top_k = 0;
  std::vector<int32_t> candidate_rows;
  std::vector<int32_t> candidate_ids;
};

/// A ScoringEngine that lets a test record, hold, release and fail batches. It calls `done` on its
/// own thread, in the order of Start. Thread-safe.
///
/// Without Hold it answers batches at once. It aborts if a caller breaks the contract of
/// ScoringEngine (more than kBatchesInFlight batches, ids out of range, spans of a wrong size).
class FakeEngine final : public ScoringEngine {
 public:
  struct Options {
    int64_t batch_rows_max = 8'192;
    int64_t hidden_size = 4;
    int64_t vocab_size = 1'000;
    Dtype dtype = Dtype::kBf16;
    uint64_t weights_version = 1;
    std::vector<ShardPlace> layout = {};
    /// Value added to every logprob, so that a test can tell which engine scored a row.
    float logprob_offset = 0;
    MemoryPlan memory = {};
    /// Number of bytes that AllocateStaging returns in total before it fails with
    /// RESOURCE_EXHAUSTED.
    int64_t staging_bytes_max = int64_t{1} << 40;
    /// True if the engine reads rows in place. The memory of its "GPUs" is ordinary memory.
    bool reads_in_place = false;
    int64_t row_step = 1;
    double kernel_seconds = 0;  ///< Reported for each scored batch.
    /// True if batches are recorded. Benchmarks set it to false.
    bool record = true;
    /// True if scores are written. Benchmarks set it to false.
    bool score = true;
  };

  FakeEngine() : FakeEngine(Options()) {}
  explicit FakeEngine(const Options& options);
  ~FakeEngine() override;  ///< Releases held batches; see BlockDestructor.

  const HeadInfo& info() const override { return info_; }
  int64_t batch_rows_max() const override { return options_.batch_rows_max; }
  MemoryPlan memory() const override { return options_.memory; }
  absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) override;
  void Start(ScoreBatch& batch, ScoreDone done) override;
  bool healthy() const override;
  bool reads_in_place() const override { return options_.reads_in_place; }
  int64_t row_step(int64_t /*num_rows*/) const override { return options_.row_step; }

  /// Makes batches wait until they are released.
  void Hold();
  /// Answers the held batches and stops holding.
  void Release();
  /// Answers the oldest held batch and keeps holding the others.
  void ReleaseOne();

  /// Makes the next `batches` batches end with `status` when they are answered.
  void FailNext(absl::Status status, int batches = 1);
  /// Makes batches of more than `rows` rows end with RESOURCE_EXHAUSTED.
  void SetFittingRows(int64_t rows);
  void SetHealthy(bool healthy);
  /// Makes the destructor wait for `end`, as that of an engine whose device hangs. `end` must
  /// outlive the engine.
  void BlockDestructor(absl::Notification& end);

  // These three abort after a minute of real time.
  /// Blocks until `count` batches are started, and returns the numbers of rows of the first
  /// `count`.
  std::vector<int64_t> WaitForBatches(int count) const;
  /// Blocks until at least `count` batches are started but not yet answered.
  void WaitUntilInFlight(int count) const;
  /// Blocks until no batch is in flight and every `done` has returned.
  void WaitUntilIdle() const;

  std::vector<RecordedBatch> batches() const;  ///< Returns the batches started so far.
  int64_t num_batches() const;
  int64_t rows_scored() const;  ///< Returns the number of rows of the batches answered with OK.
  int64_t staging_bytes() const;

 private:
  struct Pending {
    ScoreBatch* batch;
    ScoreDone done;
  };

  void Run();
  bool CanAnswer() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  HeadInfo info_;
  mutable absl::Mutex mutex_;
  std::deque<Pending> pending_ ABSL_GUARDED_BY(mutex_);
  std::vector<RecordedBatch> recorded_ ABSL_GUARDED_BY(mutex_);
  std::deque<absl::Status> failures_ ABSL_GUARDED_BY(mutex_);
  int64_t started_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t rows_scored_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t staging_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t fitting_rows_ ABSL_GUARDED_BY(mutex_);
  int releases_ ABSL_GUARDED_BY(mutex_) = 0;
  int in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  bool answering_ ABSL_GUARDED_BY(mutex_) = false;
  bool holding_ ABSL_GUARDED_BY(mutex_) = false;
  bool healthy_ ABSL_GUARDED_BY(mutex_) = true;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Notification* destructor_end_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::vector<int64_t> batch_rows_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace logprobd::testing
