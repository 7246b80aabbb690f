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

/// Limits on the rows of one batch.
struct BatchBudget {
  int64_t rows_max = 1;  ///< Maximum number of rows of a 16-bit dtype.
  /// Maximum number of rows of f32, which is lower if the staging buffer is sized for a 16-bit
  /// dtype.
  int64_t rows_max_f32 = 1;
  int64_t bulk_rows_max = 1;  ///< Maximum number of rows of requests that are not small.
  /// Maximum number of rows of all requests together, for a batch that takes fewer rows than fit.
  /// The length of clients' turns still depends on rows_max.
  int64_t taken_rows_max = std::numeric_limits<int64_t>::max();
  /// Maximum number of candidates of all rows together; a row with more candidates has a batch of
  /// its own. A slot needs 12 bytes for each candidate.
  int64_t candidates_max = int64_t{1} << 20;

  int64_t RowsFor(Dtype dtype) const { return dtype == Dtype::kF32 ? rows_max_f32 : rows_max; }
};

/// The waiting rows, in the order in which batches take them. Not thread-safe.
///
/// Within a priority, clients take turns of a few rows (deficit round robin); a turn that the end
/// of a batch interrupts continues in the next one. If a client has sub-clients, they take turns in
/// the same way within the client's turns, so that their number changes nothing for other clients.
/// Within a client or sub-client, small and large ("bulk") requests share its turns; each kind is
/// served first in, first out. A lower priority that waits behind a higher one earns 1/16 of each
/// batch; once it has earned a whole batch, it starts the next one. A batch has one dtype, that of
/// its first row; a client whose next request has another dtype keeps its turn for the next batch.
/// Clients of which something did not fit a batch start one of the next batches, one after another,
/// with what did not fit. If the rest of such a client has used its turn up, the start replaces the
/// client's next turn.
class RowQueue {
 public:
  RowQueue() = default;
  RowQueue(const RowQueue&) = delete;
  RowQueue& operator=(const RowQueue&) = delete;

  /// Adds a request, which must have a row to be scored at its next_row.
  void Push(std::shared_ptr<PendingRequest> pending);

  /// Removes a request that has is_queued set.
  void Remove(PendingRequest& pending);

  /// Removes and returns the rows of the next batch, one part per request. The result is empty only
  /// if nothing waits. A request whose last row was taken is no longer queued.
  std::vector<BatchPart> Cut(const BatchBudget& budget);

  bool empty() const { return arrivals_.empty(); }
  /// Returns the number of waiting rows; ignored rows do not count.
  int64_t rows() const { return rows_; }
  /// Returns the number of waiting rows of requests that are not small.
  int64_t bulk_rows() const { return bulk_rows_; }
  /// Returns the number of waiting rows that leave the queue before those of `pending` if it is
  /// pushed now, at least: the rows of its client, or of its sub-client if it has one, at its
  /// priority, in small or in bulk requests like it.
  int64_t RowsBefore(const PendingRequest& pending) const;
  /// Returns whether a small request waits.
  bool has_small() const { return small_requests_ > 0; }
  /// Returns the time at which the longest-waiting request was submitted. The queue must not be
  /// empty.
  absl::Time OldestSubmitted() const { return arrivals_.front()->submitted; }
  /// Returns the waiting requests in the order of Push.
  std::vector<std::shared_ptr<PendingRequest>> Queued() const;

 private:
  using Requests = std::list<std::shared_ptr<PendingRequest>>;

  struct Flow;

  /// Flows that take turns.
  struct Turns {
    /// Returns the flow with this id, or flows.end().
    std::list<Flow>::iterator Find(const std::string& id);
    /// Returns the flow with this id, which is added at the end if there is none.
    Flow& FindOrAdd(const std::string& id);
    void Erase(std::list<Flow>::iterator flow);
    /// Adds the flow to `starters`, or removes it.
    void SetStarter(std::list<Flow>::iterator flow, bool is_starter);
    /// Removes and returns the first of `starters`, which has a turn of `turn_rows` or what is left
    /// of its last one, or flows.end() if there is none.
    std::list<Flow>::iterator TakeStarter(int64_t turn_rows);

    std::list<Flow> flows;  ///< In the order of their turns; no flow is empty.
    /// Flows that cannot add rows to the batch that is being cut. They are first in the next one.
    std::list<Flow> blocked;
    /// Flows of which something did not fit the batch of their last turn, longest first, unless
    /// they have used up a turn that they took early. If the first row of a batch is taken from
    /// these turns, one of them gives it, so that a flow whose turns never come first gets a batch
    /// that its rows fit.
    std::list<std::list<Flow>::iterator> starters;
    absl::flat_hash_map<std::string, std::list<Flow>::iterator> by_id;
  };

  /// What one client has queued at one priority: its requests, or the flows of its sub-clients.
  /// A sub-client has a flow only while it has requests, so that ids that clients make up cost no
  /// memory beyond that of their requests.
  struct Flow {
    bool empty() const { return small.empty() && bulk.empty() && sub_clients.by_id.empty(); }

    std::string id;
    Turns sub_clients;
    Requests small;
    Requests bulk;
    int64_t small_rows = 0;
    int64_t bulk_rows = 0;
    int64_t deficit = 0;     ///< Rows left in the current turn.
    bool has_unfit = false;  ///< Whether its last turn left a kind of requests that did not fit.
    bool starts_with_bulk = false;  ///< Whether a start takes rows of large requests first.
    /// Whether a start was part of the next turn, which has only the rows that the start left.
    bool took_turn_early = false;
    bool is_starter = false;  ///< Whether the flow is in `starters`, at `starter_position`.
    std::list<std::list<Flow>::iterator>::iterator starter_position;
  };

  /// The requests of one priority.
  struct Level {
    Turns clients;
    double credit = 0;  ///< Rows earned by waiting behind higher priorities.
  };

  struct Cutting;

  static size_t Index(Priority priority) { return static_cast<size_t>(priority); }

  void EarnCredit(int64_t batch_rows, int64_t rows_max);
  void TakeFromLevel(Level& level, int64_t rows_max, Cutting& cutting);
  int64_t TakeInTurns(Turns& turns, int64_t rows_max, Cutting& cutting);
  int64_t TakeFromRequests(Flow& flow, bool is_start, int64_t rows_max, Cutting& cutting);
  int64_t TakeFromKind(Flow& flow, Requests& requests, int64_t rows_max, Cutting& cutting);
  void CountRows(Flow& flow, const PendingRequest& pending, int64_t rows);
  void Unlink(Requests& requests, PendingRequest& pending);

  std::array<Level, kNumPriorities> levels_;
  std::list<PendingRequest*> arrivals_;  ///< All queued requests in the order of Push.
  int64_t rows_ = 0;
  int64_t bulk_rows_ = 0;
  int64_t small_requests_ = 0;
};

}  // namespace logprobd
