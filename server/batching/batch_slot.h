#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/outputs.h"
#include "server/base/scoring_engine.h"
#include "server/batching/hidden_rows.h"
#include "server/batching/pending_request.h"

namespace logprobd {

/// A batch and all of its memory. An array keeps its memory from batch to batch unless it is larger
/// than kKeptArrayBytes.
///
/// The batch thread owns the slot while it is filled and started; the engine's thread owns it from
/// `done` on.
class BatchSlot {
 public:
  /// Only lists with 100 or more elements per row exceed this; they are rare.
  static constexpr int64_t kKeptArrayBytes = int64_t{2} << 20;

  explicit BatchSlot(std::unique_ptr<StagingBuffer> staging) : staging_(std::move(staging)) {}

  /// Takes the parts of the next batch and builds the arrays for their rows. If the engine
  /// `reads_in_place`, some parts may be marked in place; the caller gathers the hidden rows of all
  /// others into staging().
  void Fill(std::vector<BatchPart> parts, int64_t hidden_size, bool reads_in_place = false);

  /// The batch for the engine: all rows, or one half after Halve.
  ScoreBatch& batch() { return batch_; }
  const ScoreBatch& batch() const { return batch_; }

  std::byte* staging() { return staging_->data(); }
  int64_t staging_bytes() const { return staging_->size_bytes(); }
  /// Takes the staging buffer out of a slot that will not be used again. No batch may be in flight.
  std::unique_ptr<StagingBuffer> TakeStaging() { return std::move(staging_); }
  const std::vector<BatchPart>& parts() const { return parts_; }
  int64_t num_rows() const { return num_rows_; }
  /// Memory of the arrays in bytes, without staging.
  int64_t array_bytes() const;
  int64_t row_bytes() const { return row_bytes_; }

  /// True if a batch that did not fit in device memory may be tried again in two halves.
  bool CanHalve() const { return !is_halved_ && num_rows_ > 1; }
  /// Makes batch() the first half.
  void Halve();
  /// Call it when batch() has ended with `status`. If the second half has not been scored yet,
  /// makes batch() the second half and returns true.
  bool NextHalf(const absl::Status& status);

  /// Returns OK if every row of the part was scored, otherwise the error.
  const absl::Status& StatusOf(const BatchPart& part) const;

  /// Frees the arrays that an unusual batch has made large. Call it after the outputs were copied.
  void ReleaseLargeArrays();

  /// Moves the parts out, so that the slot is ready for the next Fill.
  std::vector<BatchPart> TakeParts() { return std::move(parts_); }

  /// Scores of all rows, in the batch's order; a column that no request needs is empty.
  const ScoreColumns& scores() const { return scores_; }
  /// [num_rows()], 1 for rows with nonfinite logits.
  const std::vector<uint8_t>& nonfinite() const { return nonfinite_; }
  int32_t top_k() const { return top_k_; }

  /// Times of the batch, from which the requests' StageSeconds are computed.
  absl::Time cut_time;
  absl::Time start_time;
  absl::Time end_time;  ///< The engine was done; the scores were not yet copied to the requests.
  double copy_seconds = 0;
  double kernel_seconds = 0;  ///< Of both halves, if the batch was halved.

 private:
  void AppendRows(const BatchPart& part);
  void AppendEntropyTemperatures(const BatchPart& part);
  void AppendCandidates(BatchPart& part);
  void SizeScores();
  /// Returns the lengths that the score columns have for the rows before `row`.
  ColumnCounts CountsBefore(int64_t row) const;
  void SetRange(int64_t row_begin, int64_t row_end);

  std::unique_ptr<StagingBuffer> staging_;
  std::vector<BatchPart> parts_;
  HiddenRuns runs_;
  int64_t num_rows_ = 0;
  int64_t row_bytes_ = 0;
  int32_t top_k_ = 0;
  OutputSet outputs_;
  Dtype dtype_ = Dtype::kBf16;
  std::vector<int32_t> targets_;
  std::vector<float> temperatures_;
  std::vector<float> entropy_temperatures_;
  std::vector<int32_t> candidate_rows_;
  std::vector<int32_t> candidate_ids_;
  ScoreColumns scores_;
  std::vector<uint8_t> nonfinite_;
  ScoreBatch batch_;
  int64_t range_begin_ = 0;  // Rows [range_begin_, range_end_) are in batch_.
  int64_t range_end_ = 0;
  bool is_halved_ = false;
  int64_t middle_ = 0;  // Rows below it have first_status_, the others last_status_.
  absl::Status first_status_;
  absl::Status last_status_;
};

}  // namespace logprobd
