#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/outputs.h"
#include "server/base/scoring_engine.h"
#include "server/batching/hidden_runs.h"
#include "server/batching/pending_request.h"

namespace logprobd {

/// A batch and all of its memory, which is kept from batch to batch up to kKeptArrayBytes an array.
///
/// The batch thread owns it while it is filled and started, the engine's thread from `done` on.
class BatchSlot {
 public:
  /// Lists of 100 a row and more: not worth holding until the next such batch.
  static constexpr int64_t kKeptArrayBytes = int64_t{2} << 20;

  explicit BatchSlot(std::unique_ptr<StagingBuffer> staging) : staging_(std::move(staging)) {}

  /// Takes the parts of the next batch and builds the arrays for their rows; the hidden rows of the
  /// parts that are not in place are gathered into staging() by the caller. None is unless the
  /// engine `reads_in_place`.
  void Fill(std::vector<BatchPart> parts, int64_t hidden_size, bool reads_in_place = false);

  /// The batch that the engine is to score: all rows, or one half after Halve.
  ScoreBatch& batch() { return batch_; }
  const ScoreBatch& batch() const { return batch_; }

  std::byte* staging() { return staging_->data(); }
  int64_t staging_bytes() const { return staging_->size_bytes(); }
  /// The end of the slot, which has no batch in flight.
  std::unique_ptr<StagingBuffer> TakeStaging() { return std::move(staging_); }
  const std::vector<BatchPart>& parts() const { return parts_; }
  int64_t num_rows() const { return num_rows_; }
  /// Memory that the arrays hold, staging not included.
  int64_t array_bytes() const;
  int64_t row_bytes() const { return row_bytes_; }

  /// Whether the batch that did not fit may be tried again in two halves.
  bool CanHalve() const { return !is_halved_ && num_rows_ > 1; }
  /// Makes batch() the first half.
  void Halve();
  /// After the end of batch() with `status`: makes batch() the second half and returns true if that
  /// is still to be scored.
  bool NextHalf(const absl::Status& status);

  /// OK when every row of the part was scored, else why not.
  const absl::Status& StatusOf(const BatchPart& part) const;

  /// Gives back arrays that an unusual batch has made large; the usual ones are kept. Once its
  /// outputs have been taken.
  void ReleaseLargeArrays();

  /// Drops the parts, for the next Fill.
  std::vector<BatchPart> TakeParts() { return std::move(parts_); }

  /// Scores of all rows, in the batch's order; a column that no request needs is empty.
  const ScoreColumns& scores() const { return scores_; }
  /// [num_rows()], 1 for rows with nonfinite logits.
  const std::vector<uint8_t>& nonfinite() const { return nonfinite_; }
  int32_t top_k() const { return top_k_; }

  /// Times of the batch, for the requests' StageSeconds.
  absl::Time cut_time;
  absl::Time start_time;
  double copy_seconds = 0;

 private:
  void AppendRows(const BatchPart& part);
  void AppendEntropyTemperatures(const BatchPart& part);
  void AppendCandidates(BatchPart& part);
  void SizeScores();
  /// Lengths of the score columns of the rows before `row`.
  ColumnCounts CountsBefore(int64_t row) const;
  void SetRange(int64_t row_begin, int64_t row_end);

  std::unique_ptr<StagingBuffer> staging_;
  std::vector<BatchPart> parts_;
  HiddenRuns runs_;
  int64_t num_rows_ = 0;
  int64_t row_bytes_ = 0;
  int32_t top_k_ = 0;
  OutputSet wanted_;
  Dtype dtype_ = Dtype::kBf16;
  std::vector<int32_t> targets_;
  std::vector<float> temperatures_;
  std::vector<float> entropy_temperatures_;
  std::vector<int32_t> candidate_rows_;
  std::vector<int32_t> candidate_ids_;
  ScoreColumns scores_;
  std::vector<uint8_t> nonfinite_;
  ScoreBatch batch_;
  int64_t range_begin_ = 0;  // rows of batch_
  int64_t range_end_ = 0;
  bool is_halved_ = false;
  int64_t middle_ = 0;  // rows below it have first_status_, others last_status_
  absl::Status first_status_;
  absl::Status last_status_;
};

}  // namespace logprobd
