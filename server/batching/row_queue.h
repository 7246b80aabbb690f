#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "server/base/score_request.h"
#include "server/batching/pending_request.h"

namespace logprobd {

/// How much a batch may take.
struct BatchBudget {
  int64_t rows_max = 1;       ///< Of two-byte elements.
  int64_t rows_max_f32 = 1;   ///< Fewer where the staging buffer is sized for two bytes.
  int64_t bulk_rows_max = 1;  ///< Of requests that are not small.
  /// Of all requests, where less than fits is wanted: turns of clients stay those of rows_max.
  int64_t taken_rows_max = std::numeric_limits<int64_t>::max();
  /// Of all rows together; a row with more goes alone. A slot holds 12 bytes for each.
  int64_t candidates_max = int64_t{1} << 20;

  int64_t RowsFor(Dtype dtype) const { return dtype == Dtype::kF32 ? rows_max_f32 : rows_max; }
};

/// Waiting rows to be scored, in the order in which batches take them. Not thread-safe.
///
/// Within a priority, clients take turns of a few rows (deficit round robin; a turn cut short by
/// the end of a batch goes on in the next). Within a client, small and large requests share its
/// turns and are else first in, first out. A lower priority that waits behind a higher one earns
/// 1/16 of each batch; a level owed a whole batch starts the next one. A batch has one dtype, that
/// of its first row: clients whose next request has another start the next batch.
class RowQueue {
 public:
  RowQueue() = default;
  RowQueue(const RowQueue&) = delete;
  RowQueue& operator=(const RowQueue&) = delete;

  /// `pending` has a row to be scored at its next_row.
  void Push(std::shared_ptr<PendingRequest> pending);

  /// Takes out a request with is_queued.
  void Remove(PendingRequest& pending);

  /// Takes out the rows of the next batch: one part a request, empty only if nothing waits. A
  /// request whose last row was taken is no longer queued.
  std::vector<BatchPart> Cut(const BatchBudget& budget);

  bool empty() const { return arrivals_.empty(); }
  int64_t rows() const { return rows_; }            ///< To be scored: ignored ones do not count.
  int64_t bulk_rows() const { return bulk_rows_; }  ///< Of requests that are not small.
  /// Rows that a client waits for at a priority, in requests that are as small (or not).
  int64_t ClientRows(const std::string& client_id, Priority priority, bool is_small) const;
  bool has_small() const { return small_requests_ > 0; }  ///< A small request waits.
  /// When the request that has waited longest was submitted. The queue is not empty.
  absl::Time OldestSubmitted() const { return arrivals_.front()->submitted; }
  /// That request, or null.
  PendingRequest* Oldest() const { return arrivals_.empty() ? nullptr : arrivals_.front(); }

 private:
  using Requests = std::list<std::shared_ptr<PendingRequest>>;

  /// What a client waits for at one priority.
  struct Flow {
    std::string client_id;
    Requests small;
    Requests bulk;
    int64_t small_rows = 0;
    int64_t bulk_rows = 0;
    int64_t deficit = 0;  ///< Rows left of the turn it is in.
  };

  struct Level {
    std::list<Flow> flows;  ///< In the order of their turns; none is empty.
    absl::flat_hash_map<std::string, std::list<Flow>::iterator> by_client;
    double credit = 0;  ///< Rows owed for waiting behind higher levels.
  };

  struct Cutting;

  static size_t Index(Priority priority) { return static_cast<size_t>(priority); }

  void EarnCredit(int64_t batch_rows, int64_t rows_max);
  void TakeFromLevel(Level& level, int64_t rows_max, Cutting& cutting);
  int64_t TakeFromFlow(Flow& flow, int64_t rows_max, Cutting& cutting);
  int64_t TakeFromRequests(Flow& flow, Requests& requests, int64_t rows_max, Cutting& cutting);
  void CountRows(Flow& flow, const PendingRequest& pending, int64_t rows);
  void Unlink(Requests& requests, PendingRequest& pending);

  std::array<Level, kNumPriorities> levels_;
  std::list<PendingRequest*> arrivals_;  ///< Queued requests in the order of Push.
  int64_t rows_ = 0;
  int64_t bulk_rows_ = 0;
  int64_t small_requests_ = 0;
};

}  // namespace logprobd
