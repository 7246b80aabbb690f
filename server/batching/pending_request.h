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

/// Requests up to this many rows are small: they are what a waiting user notices.
inline constexpr int64_t kSmallRequestRows = 256;

/// A submitted request until its callback has run and no batch holds a part of it.
///
/// Fields of the first group do not change after Submit; those of the second are guarded by the
/// Batcher's mutex; the third belongs to the thread that owns the batch a part is in (the batch
/// thread before launch, the engine's thread after), disjoint rows of `result` for disjoint parts.
struct PendingRequest {
  RequestTicket ticket = 0;
  ScoreRequest request;
  ScoreCallback done;
  absl::Time submitted;

  int64_t rows_to_score = 0;  ///< Rows that are not ignored.
  int64_t payload_bytes = 0;  ///< Charged while `is_charged`.

  /// A batch has taken rows: the rest belong to the same version of the weights.
  bool has_begun() const { return waiting_rows < rows_to_score; }
  bool is_small() const { return rows_to_score <= kSmallRequestRows; }

  /// First row that no batch has taken; always one to be scored, or `request.rows`.
  int64_t next_row = 0;
  int64_t waiting_rows = 0;  ///< Rows to be scored that no batch has taken.
  int parts_in_flight = 0;
  bool is_queued = false;    ///< In a RowQueue, at `queue_position` and `arrival_position`.
  bool is_retiring = false;  ///< Its rows belong to the generation that retires.
  /// Who reads the payload: the batch thread while it fills a batch, and each batch in flight whose
  /// engine reads the rows in place.
  int payload_readers = 0;
  bool is_charged = false;   ///< `payload_bytes` and the request count in Admission.
  bool is_answered = false;  ///< The callback has run, or is about to.
  bool is_finished = false;  ///< Answered, and no queue of answers holds it any more.
  int64_t held_bytes = 0;    ///< Charged for fields and answer until finished and in no batch.
  std::list<std::shared_ptr<PendingRequest>>::iterator queue_position;
  std::list<PendingRequest*>::iterator arrival_position;
  int64_t part_in_cut = -1;  ///< Index of its part while RowQueue::Cut runs.
  int64_t scored_rows = 0;
  int64_t nonfinite_rows = 0;
  int64_t first_nonfinite_row = std::numeric_limits<int64_t>::max();
  StageSeconds stages;

  ScoreResult result;
  std::vector<int64_t> piece_offsets;  ///< Of payload piece i in the payload, and its whole size.

  /// Counts the rows to be scored and finds the first; once, before the request is queued.
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

/// Rows [row_begin, row_end) of a request in a batch. Those to be scored lie at
/// [batch_row, batch_row + num_rows) there, in order.
struct BatchPart {
  std::shared_ptr<PendingRequest> pending;
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t batch_row = 0;
  int64_t num_rows = 0;
  int64_t first_candidate = 0;  ///< Of the batch's candidates.
  bool is_in_place = false;     ///< The engine reads the rows where they lie: they are not staged.

  /// No ignored row lies between the part's rows.
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

  /// Calls `function(row of the request, row of the batch, number of rows)` for each stretch of
  /// rows without an ignored one between them.
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
      if (count > 0) {
        function(first, first_in_batch, count);
      }
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
