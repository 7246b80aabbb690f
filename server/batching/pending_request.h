#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/outputs.h"
#include "server/base/score_request.h"
#include "server/base/served_head.h"

namespace logprobd {

/// A request with at most this many rows to score is small: a user is likely to wait for it.
inline constexpr int64_t kSmallRequestRows = 256;

/// A submitted request. It lives until its callback has run and no batch holds a part of it.
///
/// The fields form three groups. The first group does not change after Submit. The second group is
/// guarded by the Batcher's mutex. The third group, from `result` on, belongs to the thread that
/// owns the batch: the batch thread before launch, the engine's thread after it. Disjoint parts of
/// the request use disjoint rows of `result`.
struct PendingRequest {
  RequestTicket ticket = 0;
  ScoreRequest request;
  ScoreCallback done;
  absl::Time submitted;

  int64_t rows_to_score = 0;  ///< Number of rows that are not ignored.
  int64_t payload_bytes = 0;  ///< Charged in Admission while `is_charged`.

  /// True once a batch has taken rows. All rows of the request are then scored by the same version
  /// of the weights.
  bool has_begun() const { return waiting_rows < rows_to_score; }
  bool is_small() const { return rows_to_score <= kSmallRequestRows; }

  /// First row that no batch has taken. It is a row to be scored, or `request.rows` at the end.
  int64_t next_row = 0;
  int64_t waiting_rows = 0;  ///< Number of rows to be scored that no batch has taken.
  int parts_in_flight = 0;   ///< Number of batches that hold rows of it.
  bool is_queued = false;    ///< It is in a RowQueue, at `queue_position` and `arrival_position`.
  bool is_retiring = false;  ///< Its rows are scored by the retiring version.
  /// Number of readers of the payload: the batch thread while it fills a batch, and each batch in
  /// flight whose engine reads the rows in place.
  int payload_readers = 0;
  bool is_charged = false;   ///< Admission counts `payload_bytes` and the request itself.
  bool is_answered = false;  ///< The callback has run, or is about to.
  bool is_finished = false;  ///< It is answered and no list of answers holds it any more.
  /// Charged in Admission for the fields and the answer until the request is finished and no batch
  /// holds a part of it.
  int64_t held_bytes = 0;
  std::list<std::shared_ptr<PendingRequest>>::iterator queue_position;
  std::list<PendingRequest*>::iterator arrival_position;
  int64_t part_in_cut = -1;  ///< Index of the request's part while RowQueue::Cut runs; -1: none.
  int64_t scored_rows = 0;
  int64_t nonfinite_rows = 0;
  int64_t first_nonfinite_row = std::numeric_limits<int64_t>::max();
  StageSeconds stages;
  StageTimes times;  ///< Kept up to date if the request has `trace`.

  ScoreResult result;
  std::vector<int64_t> piece_offsets;  ///< [num_pieces + 1], start of each piece in the payload.

  /// Counts the rows to be scored and finds the first. Call it once, before the request is queued.
  void CountRows() {
    rows_to_score = request.rows - std::count(request.targets.begin(), request.targets.end(),
                                              request.ignore_index);
    waiting_rows = rows_to_score;
    SkipIgnoredRows();
  }

  /// Moves `next_row` past rows that are not scored.
  void SkipIgnoredRows() {
    while (next_row < request.rows &&
           request.targets[static_cast<size_t>(next_row)] == request.ignore_index) {
      ++next_row;
    }
  }
};

/// Rows [row_begin, row_end) of a request in a batch. The rows to be scored among them are rows
/// [batch_row, batch_row + num_rows) of the batch, in order.
struct BatchPart {
  std::shared_ptr<PendingRequest> pending;
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t batch_row = 0;
  int64_t num_rows = 0;
  int64_t first_candidate = 0;  ///< Index of its first candidate in the batch's list.
  bool is_in_place = false;     ///< The engine reads the rows in place; they are not staged.

  /// True when no ignored row lies between the part's rows.
  bool is_contiguous() const { return num_rows == row_end - row_begin; }

  /// Calls `function(row of the request, row of the batch)` for each row to be scored.
  template <typename Function>
  void ForEachRow(Function function) const {
    const ScoreRequest& request = pending->request;
    int64_t in_batch = batch_row;
    for (int64_t row = row_begin; row < row_end; ++row) {
      if (request.targets[static_cast<size_t>(row)] != request.ignore_index) {
        function(static_cast<size_t>(row), static_cast<size_t>(in_batch++));
      }
    }
  }

  /// Calls `function(row of the request, row of the batch, number of rows)` for each run of rows
  /// without an ignored row between them.
  template <typename Function>
  void ForEachStretch(Function function) const {
    if (is_contiguous()) {
      function(row_begin, batch_row, num_rows);
      return;
    }
    int64_t first = row_begin;
    int64_t first_in_batch = batch_row;
    int64_t count = 0;
    const auto flush = [&] {
      if (count > 0) function(first, first_in_batch, count);
    };
    ForEachRow([&](size_t row, size_t in_batch) {
      if (static_cast<int64_t>(row) != first + count) {
        flush();
        first = static_cast<int64_t>(row);
        first_in_batch = static_cast<int64_t>(in_batch);
        count = 0;
      }
      ++count;
    });
    flush();
  }
};

}  // namespace logprobd
