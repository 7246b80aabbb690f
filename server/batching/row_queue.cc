#include "server/batching/row_queue.h"

#include <algorithm>
#include <utility>

#include "server/base/errors.h"

namespace logprobd {
namespace {

/// Share of each batch that a waiting lower priority earns.
constexpr double kLowerPriorityShare = 1.0 / 16;

/// Returns the number of rows in a client's turn: small enough for many turns in a batch, and large
/// enough that the cost of the turns does not matter.
int64_t TurnRows(int64_t rows_max) { return std::clamp<int64_t>(rows_max / 16, 1, 64); }

}  // namespace

/// State of the batch that is being cut.
struct RowQueue::Cutting {
  BatchBudget budget;
  int64_t turn_rows = 1;
  int64_t rows_left = 0;
  int64_t bulk_rows_left = 0;
  int64_t candidates_left = 0;
  bool has_row = false;
  std::optional<Dtype> dtype = std::nullopt;
  std::vector<BatchPart> parts = {};
  std::vector<Turns*> with_blocked = {};  ///< The turns that have blocked flows.

  /// Returns whether the dtype fits, and large requests have a part of the batch left.
  bool Fits(const PendingRequest& pending) const {
    return (!dtype.has_value() || *dtype == pending.request.dtype()) &&
           (pending.is_small() || bulk_rows_left > 0);
  }

  /// Returns whether the next row's candidates fit. The first row of a batch always fits.
  bool FitsNextRow(const PendingRequest& pending) const {
    return !has_row || candidates_left >= NextCandidates(pending);
  }

  /// Returns whether rows wait of which the next one cannot be in the batch, however large it is.
  bool HasUnfit(const Requests& requests) const {
    return !requests.empty() && !(Fits(*requests.front()) && FitsNextRow(*requests.front()));
  }

  static int64_t NextCandidates(const PendingRequest& pending) {
    const std::vector<uint32_t>& offsets = pending.request.candidate_offsets;
    const auto row = static_cast<size_t>(pending.next_row);
    return offsets.empty() ? 0 : int64_t{offsets[row + 1]} - int64_t{offsets[row]};
  }

  void ChooseDtype(Dtype first) {
    if (!dtype.has_value()) {
      dtype = first;
      rows_left = std::min(rows_left, budget.RowsFor(first));
    }
  }
};

std::list<RowQueue::Flow>::iterator RowQueue::Turns::Find(const std::string& id) {
  const auto found = by_id.find(id);
  return found == by_id.end() ? flows.end() : found->second;
}

RowQueue::Flow& RowQueue::Turns::FindOrAdd(const std::string& id) {
  const auto [found, is_new] = by_id.try_emplace(id, flows.end());
  if (is_new) {
    found->second = flows.insert(flows.end(), Flow());
    found->second->id = id;
  }
  return *found->second;
}

void RowQueue::Turns::Erase(std::list<Flow>::iterator flow) {
  SetStarter(flow, false);
  by_id.erase(flow->id);
  flows.erase(flow);
}

void RowQueue::Turns::SetStarter(std::list<Flow>::iterator flow, bool is_starter) {
  if (flow->is_starter == is_starter) return;
  flow->is_starter = is_starter;
  if (is_starter) {
    flow->starter_position = starters.insert(starters.end(), flow);
  } else {
    starters.erase(flow->starter_position);
  }
}

std::list<RowQueue::Flow>::iterator RowQueue::Turns::TakeStarter(int64_t turn_rows) {
  if (starters.empty()) return flows.end();
  const auto flow = starters.front();
  SetStarter(flow, false);
  if (flow->deficit <= 0) flow->deficit = turn_rows;
  flow->took_turn_early = true;
  return flow;
}

void RowQueue::Push(std::shared_ptr<PendingRequest> pending) {
  PendingRequest& request = *pending;
  LOGPROBD_CHECK(!request.is_queued && request.next_row < request.request.rows);
  const std::string& sub_client_id = request.request.sub_client_id;
  Flow& client =
      levels_[Index(request.request.priority())].clients.FindOrAdd(request.request.client_id);
  Flow& flow = sub_client_id.empty() ? client : client.sub_clients.FindOrAdd(sub_client_id);
  Requests& requests = request.is_small() ? flow.small : flow.bulk;
  request.is_queued = true;
  small_requests_ += request.is_small() ? 1 : 0;
  request.queue_position = requests.insert(requests.end(), std::move(pending));
  request.arrival_position = arrivals_.insert(arrivals_.end(), &request);
  CountRows(flow, request, request.waiting_rows);
}

std::vector<std::shared_ptr<PendingRequest>> RowQueue::Queued() const {
  std::vector<std::shared_ptr<PendingRequest>> queued;
  queued.reserve(arrivals_.size());
  for (const PendingRequest* pending : arrivals_) queued.push_back(*pending->queue_position);
  return queued;
}

void RowQueue::Remove(PendingRequest& pending) {
  LOGPROBD_CHECK(pending.is_queued);
  Turns& clients = levels_[Index(pending.request.priority())].clients;
  const auto client = clients.Find(pending.request.client_id);
  LOGPROBD_CHECK(client != clients.flows.end());
  const auto remove_from = [&](Flow& flow) {
    CountRows(flow, pending, -pending.waiting_rows);
    Unlink(pending.is_small() ? flow.small : flow.bulk, pending);
  };
  if (pending.request.sub_client_id.empty()) {
    remove_from(*client);
  } else {
    Turns& sub_clients = client->sub_clients;
    const auto sub_client = sub_clients.Find(pending.request.sub_client_id);
    LOGPROBD_CHECK(sub_client != sub_clients.flows.end());
    remove_from(*sub_client);
    if (sub_client->empty()) sub_clients.Erase(sub_client);
  }
  if (client->empty()) clients.Erase(client);
}

std::vector<BatchPart> RowQueue::Cut(const BatchBudget& budget) {
  Cutting cutting{.budget = budget,
                  .turn_rows = TurnRows(budget.rows_max),
                  .rows_left = std::min(budget.rows_max, budget.taken_rows_max),
                  .bulk_rows_left = budget.bulk_rows_max,
                  .candidates_left = budget.candidates_max};
  EarnCredit(cutting.rows_left, budget.rows_max);
  // A level that has earned a whole batch is first. If its rows have another dtype than all others,
  // they do not fit a batch that begins with rows of another level.
  for (size_t i = levels_.size(); i-- > 1;) {
    if (levels_[i].credit >= static_cast<double>(budget.rows_max)) {
      TakeFromLevel(levels_[i], cutting.rows_left, cutting);
    }
  }
  for (size_t i = 0; i < levels_.size(); ++i) {
    int64_t reserved = 0;
    for (size_t lower = i + 1; lower < levels_.size(); ++lower) {
      reserved += static_cast<int64_t>(levels_[lower].credit);
    }
    TakeFromLevel(levels_[i], cutting.rows_left - reserved, cutting);
  }
  for (Level& level : levels_) {
    TakeFromLevel(level, cutting.rows_left, cutting);  // Uses reserved rows that nobody took.
  }
  for (Turns* const turns : cutting.with_blocked) {
    turns->flows.splice(turns->flows.begin(), turns->blocked);
  }
  int64_t batch_row = 0;
  for (BatchPart& part : cutting.parts) {
    part.batch_row = batch_row;
    batch_row += part.num_rows;
    part.pending->part_in_cut = -1;
  }
  return std::move(cutting.parts);
}

int64_t RowQueue::RowsBefore(const PendingRequest& pending) const {
  const Turns* turns = &levels_[Index(pending.request.priority())].clients;
  const std::string& sub_client_id = pending.request.sub_client_id;
  auto found = turns->by_id.find(pending.request.client_id);
  if (found != turns->by_id.end() && !sub_client_id.empty()) {
    turns = &found->second->sub_clients;
    found = turns->by_id.find(sub_client_id);
  }
  if (found == turns->by_id.end()) return 0;
  return pending.is_small() ? found->second->small_rows : found->second->bulk_rows;
}

void RowQueue::EarnCredit(int64_t batch_rows, int64_t rows_max) {
  bool higher_waits = !levels_[0].clients.flows.empty();
  for (size_t i = 1; i < levels_.size(); ++i) {
    Level& level = levels_[i];
    const double earned = static_cast<double>(batch_rows) * kLowerPriorityShare;
    if (level.clients.flows.empty()) {
      level.credit = 0;
    } else if (higher_waits) {
      level.credit = std::min(level.credit + earned, static_cast<double>(rows_max));
    }
    higher_waits = higher_waits || !level.clients.flows.empty();
  }
}

void RowQueue::TakeFromLevel(Level& level, int64_t rows_max, Cutting& cutting) {
  const int64_t taken = TakeInTurns(level.clients, rows_max, cutting);
  level.credit = std::max(level.credit - static_cast<double>(taken), 0.0);
}

int64_t RowQueue::TakeInTurns(Turns& turns, int64_t rows_max, Cutting& cutting) {
  int64_t taken = 0;
  rows_max = std::min(rows_max, cutting.rows_left);
  const bool begins_batch = rows_max > 0 && !cutting.has_row && turns.blocked.empty();
  auto starter = begins_batch ? turns.TakeStarter(cutting.turn_rows) : turns.flows.end();
  while (rows_max > 0 && !turns.flows.empty()) {
    const bool is_start = starter != turns.flows.end();
    const auto flow = is_start ? std::exchange(starter, turns.flows.end()) : turns.flows.begin();
    if (!is_start) {
      const bool had_taken_turn_early = std::exchange(flow->took_turn_early, false);
      if (flow->deficit <= 0) {
        if (had_taken_turn_early) {
          turns.flows.splice(turns.flows.end(), turns.flows, flow);
          continue;
        }
        flow->deficit = cutting.turn_rows;
      }
    }
    const int64_t flow_rows_max = std::min(flow->deficit, rows_max);
    const int64_t flow_taken = flow->sub_clients.by_id.empty()
                                   ? TakeFromRequests(*flow, is_start, flow_rows_max, cutting)
                                   : TakeInTurns(flow->sub_clients, flow_rows_max, cutting);
    taken += flow_taken;
    // The first row determines the dtype, and with it the budget.
    rows_max = std::min(rows_max - flow_taken, cutting.rows_left);
    flow->deficit -= flow_taken;
    if (flow->empty()) {
      turns.Erase(flow);
      continue;
    }
    const bool is_blocked = flow->deficit > 0 && rows_max > 0;
    const bool has_unfit = flow->has_unfit || !flow->sub_clients.starters.empty();
    turns.SetStarter(flow, is_blocked || (has_unfit && !flow->took_turn_early));
    if (flow->took_turn_early) {
      continue;  // It keeps its place, where it has what is left of this turn.
    }
    if (flow->deficit == 0) {
      turns.flows.splice(turns.flows.end(), turns.flows, flow);
    } else if (is_blocked) {
      if (turns.blocked.empty()) cutting.with_blocked.push_back(&turns);
      turns.blocked.splice(turns.blocked.end(), turns.flows, flow);
    }
  }
  return taken;
}

int64_t RowQueue::TakeFromRequests(Flow& flow, bool is_start, int64_t rows_max, Cutting& cutting) {
  const bool begins_with_bulk = is_start && flow.starts_with_bulk;
  Requests& first = begins_with_bulk ? flow.bulk : flow.small;
  Requests& second = begins_with_bulk ? flow.small : flow.bulk;
  // Each kind gets half of a turn when both wait, and what the other leaves.
  const int64_t first_share = second.empty() ? rows_max : (rows_max + 1) / 2;
  int64_t taken = TakeFromKind(flow, first, first_share, cutting);
  taken += TakeFromKind(flow, second, rows_max - taken, cutting);
  taken += TakeFromKind(flow, first, rows_max - taken, cutting);

  const bool small_unfit = cutting.HasUnfit(flow.small);
  const bool bulk_unfit = cutting.HasUnfit(flow.bulk);
  flow.has_unfit = small_unfit || bulk_unfit;
  if (small_unfit != bulk_unfit) {
    flow.starts_with_bulk = bulk_unfit;
  } else if (is_start) {
    flow.starts_with_bulk = !flow.starts_with_bulk;
  }
  return taken;
}

int64_t RowQueue::TakeFromKind(Flow& flow, Requests& requests, int64_t rows_max, Cutting& cutting) {
  int64_t taken = 0;
  while (taken < rows_max && !requests.empty() && cutting.Fits(*requests.front())) {
    PendingRequest& pending = *requests.front();
    cutting.ChooseDtype(pending.request.dtype());
    const bool is_small = pending.is_small();
    const int64_t batch_rows_left =
        is_small ? cutting.rows_left : std::min(cutting.rows_left, cutting.bulk_rows_left);
    const int64_t part_rows_max = std::min(rows_max - taken, batch_rows_left);
    if (part_rows_max <= 0 || !cutting.FitsNextRow(pending)) break;
    if (pending.part_in_cut < 0) {
      pending.part_in_cut = static_cast<int64_t>(cutting.parts.size());
      cutting.parts.push_back(BatchPart{
          .pending = requests.front(), .row_begin = pending.next_row, .row_end = pending.next_row});
    }
    BatchPart& part = cutting.parts[static_cast<size_t>(pending.part_in_cut)];
    int64_t part_rows = 0;
    while (part_rows < part_rows_max && pending.next_row < pending.request.rows &&
           cutting.FitsNextRow(pending)) {
      cutting.candidates_left -= Cutting::NextCandidates(pending);
      cutting.has_row = true;
      ++part_rows;
      ++pending.next_row;
      // The part ends right after a scored row, so that is_contiguous() is true if possible.
      part.row_end = pending.next_row;
      pending.SkipIgnoredRows();
    }
    pending.waiting_rows -= part_rows;
    CountRows(flow, pending, -part_rows);
    part.num_rows += part_rows;
    taken += part_rows;
    cutting.rows_left -= part_rows;
    cutting.bulk_rows_left -= is_small ? 0 : part_rows;
    if (pending.next_row == pending.request.rows) Unlink(requests, pending);
  }
  return taken;
}

void RowQueue::CountRows(Flow& flow, const PendingRequest& pending, int64_t rows) {
  (pending.is_small() ? flow.small_rows : flow.bulk_rows) += rows;
  rows_ += rows;
  bulk_rows_ += pending.is_small() ? 0 : rows;
}

void RowQueue::Unlink(Requests& requests, PendingRequest& pending) {
  pending.is_queued = false;
  small_requests_ -= pending.is_small() ? 1 : 0;
  arrivals_.erase(pending.arrival_position);
  requests.erase(pending.queue_position);  // May destroy `pending`.
}

}  // namespace logprobd
