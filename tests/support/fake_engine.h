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
#include "absl/types/span.h"
#include "server/base/scoring_engine.h"

namespace logprobd::testing {

/// What FakeEngine makes of a row: a function of the row's bytes, target and temperatures alone, so
/// that a score in the wrong place shows. Not related to any real head.
struct FakeScores {
  float logprob = 0;  ///< In (-16, 0).
  float entropy = 0;
  float lse = 0;
  int32_t argmax_id = 0;  ///< First two bytes of the row, little endian, modulo the vocabulary.
  float argmax_logprob = 0;
  float sum_p_squared = 0;
  float max_logit = 0;
  float min_logit = 0;
  bool nonfinite = false;  ///< An element is NaN or Inf: floats are NaN, ids -1.
};

FakeScores FakeScoresOf(absl::Span<const std::byte> row, Dtype dtype, int32_t target,
                        float temperature, float entropy_temperature, int64_t vocab_size);

/// The row's best ids, `rank` from 0: (argmax_id + rank) modulo the vocabulary.
int32_t FakeTopKId(const FakeScores& scores, int32_t rank, int64_t vocab_size);
float FakeTopKLogprob(const FakeScores& scores, int32_t rank);
float FakeCandidateLogprob(const FakeScores& scores, int32_t id);

/// A batch as FakeEngine received it, copied.
struct RecordedBatch {
  Dtype dtype = Dtype::kBf16;
  int64_t num_rows = 0;
  std::vector<std::byte> hidden;  ///< All rows, wherever they were.
  std::vector<HiddenRun> runs;
  std::vector<int32_t> targets;
  std::vector<float> temperatures;
  std::vector<float> entropy_temperatures;
  OutputSet outputs;
  int32_t top_k = 0;
  std::vector<int32_t> candidate_rows;
  std::vector<int32_t> candidate_ids;
};

/// A ScoringEngine whose batches a test records, holds, releases and fails. `done` is called on the
/// engine's thread, in the order of Start. Thread-safe.
///
/// Without Hold a batch is answered at once. Breaking the contract of ScoringEngine (more than
/// kBatchesInFlight batches, ids out of range, a row of an odd size) aborts.
class FakeEngine final : public ScoringEngine {
 public:
  struct Options {
    int64_t batch_rows_max = 8'192;
    int64_t hidden_size = 4;
    int64_t vocab_size = 1'000;
    Dtype dtype = Dtype::kBf16;
    uint64_t weights_version = 1;
    std::vector<ShardPlace> layout = {};
    /// Added to every logprob: which engine scored a row shows.
    float logprob_offset = 0;
    MemoryPlan memory = {};
    /// AllocateStaging beyond it, in all, is RESOURCE_EXHAUSTED.
    int64_t staging_bytes_max = int64_t{1} << 40;
    /// Whether it reads rows in place. The memory of "GPUs" is ordinary memory here.
    bool reads_in_place = false;
    int64_t row_step = 1;
    /// Off for benchmarks: nothing is recorded.
    bool record = true;
    /// Off for benchmarks: outputs are left as they are.
    bool score = true;
  };

  FakeEngine() : FakeEngine(Options()) {}
  explicit FakeEngine(const Options& options);
  ~FakeEngine() override;  ///< Releases what is held.

  const HeadInfo& info() const override { return info_; }
  int64_t batch_rows_max() const override { return options_.batch_rows_max; }
  MemoryPlan memory() const override { return options_.memory; }
  absl::StatusOr<std::unique_ptr<StagingBuffer>> AllocateStaging(int64_t size_bytes) override;
  void Start(ScoreBatch& batch, ScoreDone done) override;
  bool healthy() const override;
  bool reads_in_place() const override { return options_.reads_in_place; }
  int64_t row_step(int64_t /*num_rows*/) const override { return options_.row_step; }

  /// From now on batches wait until they are released.
  void Hold();
  /// Answers what is held and holds no more.
  void Release();
  /// Answers the oldest held batch and goes on holding.
  void ReleaseOne();

  /// The next `batches` batches end with `status` (when they are answered).
  void FailNext(absl::Status status, int batches = 1);
  /// Batches of more rows than this end with RESOURCE_EXHAUSTED.
  void SetFittingRows(int64_t rows);
  void SetHealthy(bool healthy);

  /// Blocks until `count` batches have been started, and returns the rows of the first `count`.
  std::vector<int64_t> WaitForBatches(int count) const;
  /// Blocks until `count` batches are started and not answered.
  void WaitUntilInFlight(int count) const;
  /// Blocks until no batch is in flight and every `done` has returned.
  void WaitUntilIdle() const;

  std::vector<RecordedBatch> batches() const;  ///< Started so far.
  int64_t num_batches() const;
  int64_t rows_scored() const;  ///< Rows of the batches answered with OK.
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
  std::vector<int64_t> batch_rows_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace logprobd::testing
