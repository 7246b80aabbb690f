// The part of BatcherMixture that says what must come of each event.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "server/batching/launch_rule.h"
#include "tests/unit/server/batching/batcher_mixture.h"

namespace logprobd::testing {
namespace {

int64_t ShareOf(int64_t limit, double share) {
  return std::max<int64_t>(static_cast<int64_t>(std::floor(static_cast<double>(limit) * share)), 1);
}

}  // namespace

QueueLoad BatcherMixture::Asked::load() const {
  QueueLoad load{.rows = waiting_rows()};
  const bool is_gathered = due.has_value() || rows_started == rows_to_score;
  if (!is_gathered || in_place_parts > 0) {
    load.bytes += payload_bytes;
    load.requests = 1;
  }
  if (!has_ended()) load.bytes += held_bytes;
  return load;
}

ScoreResult BatcherMixture::Asked::Result() const {
  ScoreResult result = expected;
  result.weights_version = number;
  for (size_t row = 0; row < result.logprob.size(); ++row) {
    if (request.targets[row] != request.ignore_index) result.logprob[row] += OffsetOf(number);
  }
  return result;
}

void BatcherMixture::Asked::SkipIgnoredRows() {
  while (next_row < request.rows &&
         request.targets[static_cast<size_t>(next_row)] == request.ignore_index) {
    ++next_row;
  }
}

int BatcherMixture::Version::NumHealthy() const {
  return static_cast<int>(
      absl::c_count_if(members, [](const Replica& each) { return each.engine->healthy(); }));
}

int BatcherMixture::Version::NumInFlight() const {
  int count = 0;
  for (const Replica& each : members) count += each.in_flight;
  return count;
}

std::optional<int> BatcherMixture::Version::FewestInFlight() const {
  std::optional<int> fewest;
  for (const Replica& each : members) {
    if (each.engine->healthy() && each.in_flight < ScoringEngine::kBatchesInFlight) {
      fewest = std::min(fewest.value_or(each.in_flight), each.in_flight);
    }
  }
  return fewest;
}

void BatcherMixture::Rate::Add(int64_t rows, int64_t representative_rows, absl::Time started,
                               absl::Time ended, size_t replica) {
  absl::Time& last_end = last_ends.try_emplace(replica, absl::InfinitePast()).first->second;
  const absl::Duration alone = ended - std::max(started, last_end);
  last_end = ended;
  if (alone <= absl::ZeroDuration()) return;
  const double seconds = absl::ToDoubleSeconds(alone) / static_cast<double>(rows);
  const bool is_representative = rows >= representative_rows;
  measured.push_back({ended, seconds, is_representative});
  if (is_representative) mean = mean == 0 ? seconds : 0.8 * mean + 0.2 * seconds;
}

absl::Duration BatcherMixture::Rate::RetryAfter(double rows) const {
  const absl::Duration time =
      mean == 0 ? DrainRate::kRetryAfterUnmeasured : absl::Seconds(rows * mean / num_replicas);
  return std::clamp(time, absl::Milliseconds(1), absl::Seconds(10));
}

bool BatcherMixture::Rate::MustRefuse(int64_t rows, absl::Duration left, absl::Time now) const {
  // The best rate is that of at least the last 5 s and at most the last 15 s.
  double least = std::numeric_limits<double>::infinity();
  bool is_measured = false;
  for (const Measured& each : measured) {
    if (each.ended > now - 3 * DrainRate::kMemory) least = std::min(least, each.seconds_per_row);
    is_measured = is_measured || (each.is_representative && each.ended > now - DrainRate::kMemory);
  }
  const double seconds = static_cast<double>(rows) * least / num_replicas;
  return is_measured && seconds > absl::ToDoubleSeconds(left) * (1 + 1e-9);
}

bool BatcherMixture::Rate::MayRefuse(int64_t rows, absl::Duration left, absl::Time now) const {
  double most = std::numeric_limits<double>::infinity();
  bool is_measured = false;
  for (const Measured& each : measured) {
    if (each.is_representative && each.ended > now - DrainRate::kMemory) {
      most = std::min(most, each.seconds_per_row);
    }
    is_measured = is_measured || each.ended > now - 3 * DrainRate::kMemory;
  }
  const double seconds = static_cast<double>(rows) * most / num_replicas;
  return is_measured && seconds > absl::ToDoubleSeconds(left) * (1 - 1e-9);
}

void BatcherMixture::MakeDue(Asked& asked, absl::StatusCode code) {
  if (code == absl::StatusCode::kDeadlineExceeded) {
    ++num_late_[asked.next_row < asked.request.rows ? kQueue : kEngine];
  }
  asked.due = code;
}

void BatcherMixture::MakeUnservableDue(Head& head) {
  for (Asked* asked : head.active) {
    const Version* const version = asked->is_retiring ? head.retiring : head.live;
    if (asked->waiting_rows() > 0 && version != nullptr && version->NumHealthy() == 0) {
      MakeDue(*asked, absl::StatusCode::kUnavailable);
    }
  }
}

BatcherMixture::Waiting BatcherMixture::WaitingFor(const Head& head, bool is_retiring) const {
  Waiting waiting;
  for (const Asked* asked : head.active) {
    const int64_t rows = asked->waiting_rows();
    if (rows == 0 || asked->is_retiring != is_retiring) continue;
    waiting.rows += rows;
    waiting.bulk += asked->is_small() ? 0 : rows;
    waiting.has_small = waiting.has_small || asked->is_small();
    waiting.oldest = std::min(waiting.oldest, asked->submitted);
    waiting.requests.push_back(asked);
  }
  return waiting;
}

int64_t BatcherMixture::BulkRowsMax(const Head& head, const Waiting& waiting) const {
  const int64_t rows_max = head.options.batch_rows_max;
  const bool is_shared =
      waiting.has_small || clock_.Now() - head.live->last_small <= LaunchRule::kSmallMemory;
  return is_shared ? std::max<int64_t>(rows_max / 4, 1) : rows_max;
}

bool BatcherMixture::VersionsTakeTurns(const Head& head) const {
  return head.live != nullptr && head.retiring != nullptr && head.live->waits_for_peers;
}

bool BatcherMixture::MustLaunch(const Head& head) const {
  const Waiting waiting = WaitingFor(head, /*is_retiring=*/false);
  if (head.live == nullptr || waiting.rows == 0) return false;
  const std::optional<int> in_flight = head.live->FewestInFlight();
  if (!in_flight.has_value()) return false;
  if (*in_flight == 0 || waiting.rows >= head.options.batch_rows_max ||
      waiting.bulk >= BulkRowsMax(head, waiting)) {
    return true;
  }
  absl::Time idle = absl::InfiniteFuture();
  for (const Replica& replica : head.live->members) {
    if (replica.engine->healthy() && replica.in_flight == *in_flight) {
      idle = std::min(idle, replica.busy_since + replica.last_batch);
    }
  }
  const absl::Time now = clock_.Now();
  return now >= waiting.oldest + head.options.batch_wait_max ||
         now >= idle - LaunchRule::kPrepareTime;
}

BatcherMixture::Prediction BatcherMixture::Predict(Head& head, const Asked& asked) const {
  const ScoreRequest& request = asked.request;
  const Version* const live = head.live;
  const absl::Time now = clock_.Now();
  if (live != nullptr && live->NumHealthy() == 0) {
    return {.code = absl::StatusCode::kUnavailable, .reason = Rejection::kNotReady};
  }
  if (live == nullptr && !head.failure.ok()) return {.code = head.failure.code()};
  if (asked.is_on_gpu && !head.engine.reads_in_place) {
    return {.code = absl::StatusCode::kFailedPrecondition};
  }
  if (request.weights_version != 0 &&
      (live == nullptr || request.weights_version != live->number)) {
    return {.code = absl::StatusCode::kFailedPrecondition};
  }
  if (live != nullptr) head.rate.num_replicas = live->NumHealthy();
  if (request.deadline <= now) {
    return {.code = absl::StatusCode::kDeadlineExceeded, .reason = Rejection::kDeadline};
  }
  Prediction prediction = PredictAdmission(head, asked).value_or(Prediction());
  if (request.deadline == absl::InfiniteFuture()) return prediction;
  const Waiting waiting = WaitingFor(head, /*is_retiring=*/false);
  const bool is_idle = waiting.rows == 0 && live != nullptr && live->FewestInFlight() == 0;
  if (is_idle && !VersionsTakeTurns(head)) return prediction;
  int64_t rows = asked.rows_to_score;
  for (const Asked* each : waiting.requests) {
    const ScoreRequest& other = each->request;
    if (other.client_id == request.client_id && other.sub_client_id == request.sub_client_id &&
        other.priority() == request.priority() && each->is_small() == asked.is_small()) {
      rows += each->waiting_rows();
    }
  }
  const absl::Duration left = request.deadline - now;
  if (!is_idle && head.rate.MustRefuse(rows, left, now)) {
    return {.code = absl::StatusCode::kDeadlineExceeded, .reason = Rejection::kDeadline};
  }
  prediction.may_be_late = head.rate.MayRefuse(rows, left, now);
  return prediction;
}

std::optional<BatcherMixture::Prediction> BatcherMixture::PredictAdmission(
    const Head& head, const Asked& asked) const {
  const ScoreRequest& request = asked.request;
  const Batcher::Options& options = head.options;
  const double share = request.client_share == 0 ? options.client_share_max : request.client_share;
  const QueueLoad more{
      .rows = asked.rows_to_score, .bytes = asked.payload_bytes + asked.held_bytes, .requests = 1};
  if (more.rows > ShareOf(options.queue_rows_max, share) ||
      more.bytes > ShareOf(options.queue_bytes_max, share)) {
    return Prediction{.code = absl::StatusCode::kInvalidArgument, .reason = Rejection::kInvalid};
  }
  QueueLoad total;
  QueueLoad client;
  for (const Asked* each : head.active) {
    total += each->load();
    if (each->request.client_id == request.client_id) client += each->load();
  }
  struct Limit {
    int64_t QueueLoad::*field;
    int64_t limit;
    Rejection reason;
  };
  const Limit limits[] = {
      {&QueueLoad::rows, options.queue_rows_max, Rejection::kQueueRows},
      {&QueueLoad::bytes, options.queue_bytes_max, Rejection::kQueueBytes},
      {&QueueLoad::requests, options.queue_requests_max, Rejection::kQueueRequests}};
  for (const bool is_share : {false, true}) {
    for (const auto& [field, limit, reason] : limits) {
      const int64_t held = is_share ? client.*field : total.*field;
      const int64_t limit_now = is_share ? ShareOf(limit, share) : limit;
      const int64_t excess = held + more.*field - limit_now;
      if (excess <= 0) continue;
      // What is too much leaves with the rows that wait, each of which has an equal part of it.
      double rows = static_cast<double>(excess);
      bool has_rows = true;
      if (field != &QueueLoad::rows) {
        has_rows = total.rows > 0;
        rows *= static_cast<double>(total.rows) / static_cast<double>(total.*field);
      }
      return Prediction{
          .code = absl::StatusCode::kResourceExhausted,
          .reason = is_share ? Rejection::kClientShare : reason,
          .hint = has_rows ? head.rate.RetryAfter(rows) : DrainRate::kRetryAfterUnmeasured};
    }
  }
  return std::nullopt;
}

void BatcherMixture::OnStart(Version& version, size_t replica, const ScoreBatch& batch) {
  {
    const absl::MutexLock lock(&mutex_);
    EndLostPieces();
    // The rows that the engine reads.
    const auto row_bytes = static_cast<size_t>(kHiddenSize * DtypeBytes(batch.dtype));
    std::vector<const std::byte*> places;
    const auto add = [&](const std::byte* begin, int64_t num_rows) {
      for (int64_t row = 0; row < num_rows; ++row) {
        places.push_back(begin + static_cast<size_t>(row) * row_bytes);
      }
    };
    if (batch.runs.empty()) add(batch.hidden, batch.num_rows);
    for (const HiddenRun& run : batch.runs) add(run.data, run.num_rows);
    std::vector<std::pair<Asked*, int64_t>> rows;
    for (const std::byte* place : places) {
      std::array<uint16_t, 2> marks{};
      std::memcpy(marks.data(), place, sizeof(marks));
      LOGPROBD_CHECK(marks[0] < asked_.size(), marks[0]);
      rows.emplace_back(asked_[marks[0]].get(), marks[1]);
    }

    events_.push_back(absl::StrCat("  ", version.head->name, " starts ", rows.size(),
                                   " rows on version ", version.number, ", replica ", replica,
                                   " from row ", rows.front().second, " of request ",
                                   rows.front().first->id));
    Replica& member = version.members[replica];
    const auto relaunch = absl::c_find_if(member.relaunches, [&rows](const Flight& flight) {
      const Batch& halved = *flight.batch;
      const bool is_first = flight.piece == Flight::Piece::kFirst;
      const auto middle = halved.rows.begin() + halved.middle;
      return std::equal(rows.begin(), rows.end(), is_first ? halved.rows.begin() : middle,
                        is_first ? middle : halved.rows.end());
    });
    if (relaunch != member.relaunches.end()) {
      member.flights.push_back(*relaunch);
      member.relaunches.erase(relaunch);
    } else {
      BeginBatch(version, replica, batch, std::move(rows));
    }
  }
  InterfereWithStart(*version.head);
}

void BatcherMixture::BeginBatch(Version& version, size_t replica, const ScoreBatch& batch,
                                std::vector<std::pair<Asked*, int64_t>> rows) {
  Head& head = *version.head;
  Replica& member = version.members[replica];
  const absl::Time now = clock_.Now();
  const bool is_retiring = &version == head.retiring;
  EXPECT_TRUE(is_retiring || &version == head.live) << "version " << version.number << " starts";
  EXPECT_TRUE(member.engine->healthy()) << "a lost replica starts a batch";
  const Waiting waiting = WaitingFor(head, is_retiring);
  const int64_t bulk_max = is_retiring ? head.options.batch_rows_max : BulkRowsMax(head, waiting);
  if (heads_.size() == 1) {
    EXPECT_EQ(member.in_flight, version.FewestInFlight().value_or(-1));
    EXPECT_TRUE(is_retiring || MustLaunch(head)) << "a batch starts early";
  }
  if (VersionsTakeTurns(head)) {
    EXPECT_EQ((is_retiring ? head.live : head.retiring)->NumInFlight(), 0);
  }
  // Kernels of two teams on one device could wait for each other.
  for (const auto& other : heads_) {
    for (size_t lane = 0; turns_ != nullptr && lane < other->lanes.size(); ++lane) {
      const bool is_same = other.get() == &head && lane == replica;
      if (is_same || !other->lanes[lane].waits_for_peers || !head.lanes[replica].waits_for_peers) {
        continue;
      }
      for (const auto& each : other->versions) EXPECT_EQ(each->members[lane].in_flight, 0);
    }
  }

  auto begun = std::make_shared<Batch>();
  begun->version = &version;
  begun->replica = replica;
  begun->started = now;
  int64_t bulk = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    auto& [asked, row] = rows[i];
    const std::string what = absl::StrCat("row ", row, " of request ", asked->id);
    const bool is_failing = turns_ != nullptr && asked->is_failing && !asked->answer.has_value();
    EXPECT_TRUE(is_failing || !asked->due.has_value())
        << what << " is started after its request's end";
    EXPECT_GT(asked->request.deadline, now) << what;
    EXPECT_EQ(asked->head, &head) << what;
    EXPECT_EQ(row, asked->next_row) << what;
    EXPECT_EQ(asked->is_retiring, is_retiring) << what;
    EXPECT_TRUE(asked->version == nullptr || asked->version == &version) << what;
    const uint64_t pinned = asked->request.weights_version;
    EXPECT_TRUE(pinned == 0 || pinned == version.number) << what;
    if (begun->parts.empty() || begun->parts.back().asked != asked) {
      for (const Part& part : begun->parts) EXPECT_NE(part.asked, asked) << what << " is apart";
      begun->parts.push_back({.asked = asked,
                              .batch_row = static_cast<int64_t>(i),
                              .num_rows = 0,
                              .is_in_place = asked->is_on_gpu});
      ++asked->parts_in_flight;
      asked->in_place_parts += asked->is_on_gpu ? 1 : 0;
    }
    Part& part = begun->parts.back();
    ++part.num_rows;
    asked->version = &version;
    asked->number = version.number;
    ++asked->rows_started;
    ++asked->next_row;
    asked->SkipIgnoredRows();
    bulk += asked->is_small() ? 0 : 1;
  }
  // Requests of one kind and flow are served in their order.
  for (const Part& part : begun->parts) {
    for (const Asked* other : waiting.requests) {
      const ScoreRequest& a = part.asked->request;
      const ScoreRequest& b = other->request;
      const bool is_behind = other->id < part.asked->id && a.client_id == b.client_id &&
                             a.sub_client_id == b.sub_client_id && a.priority() == b.priority() &&
                             part.asked->is_small() == other->is_small() &&
                             other->waiting_rows() > 0;
      EXPECT_FALSE(is_behind) << part.asked->id << " passes " << other->id;
    }
  }
  const auto num_rows = static_cast<int64_t>(rows.size());
  const int64_t rows_max = batch.dtype == Dtype::kF32
                               ? std::max<int64_t>(head.options.batch_rows_max / 2, 1)
                               : head.options.batch_rows_max;
  EXPECT_LE(num_rows, rows_max);
  EXPECT_LE(bulk, bulk_max);
  const bool has_one_kind = absl::c_all_of(waiting.requests, [&batch](const Asked* each) {
    return each->request.dtype() == batch.dtype && each->request.candidate_ids.empty();
  });
  if (heads_.size() == 1 && has_one_kind && head.engine.row_step == 1 && !is_retiring) {
    EXPECT_EQ(num_rows,
              std::min(waiting.rows - waiting.bulk + std::min(waiting.bulk, bulk_max), rows_max));
  }
  begun->rows = std::move(rows);
  head.started_rows += num_rows;
  ++head.started_batches;
  if (member.in_flight++ == 0) member.busy_since = now;
  member.flights.push_back({.batch = std::move(begun)});
}

void BatcherMixture::EndPiece(Replica& replica, const Flight& flight, const absl::Status& status) {
  using Piece = Flight::Piece;
  Batch& batch = *flight.batch;
  if (flight.piece == Piece::kWhole && absl::IsResourceExhausted(status) && batch.rows.size() > 1) {
    batch.middle = static_cast<int64_t>(batch.rows.size()) / 2;
    replica.relaunches.push_back({flight.batch, Piece::kFirst});
  } else if (flight.piece == Piece::kFirst) {
    batch.first = status;
    replica.relaunches.push_back({flight.batch, Piece::kSecond});
  } else {
    batch.last = status;
    EndWhole(replica, batch);
  }
}

void BatcherMixture::EndWhole(Replica& replica, Batch& batch) {
  Head& head = *batch.version->head;
  const absl::Time now = clock_.Now();
  const auto num_rows = static_cast<int64_t>(batch.rows.size());
  bool all_scored = true;
  for (const Part& part : batch.parts) {
    Asked& asked = *part.asked;
    const bool is_in_first = part.batch_row < batch.middle;
    const bool is_in_last = part.batch_row + part.num_rows > batch.middle;
    const absl::Status& status =
        is_in_first && (!batch.first.ok() || !is_in_last) ? batch.first : batch.last;
    --asked.parts_in_flight;
    asked.in_place_parts -= part.is_in_place ? 1 : 0;
    all_scored = all_scored && status.ok();
    if (asked.due.has_value()) continue;
    if (!status.ok()) {
      // With turns, the batch thread may be woken before the requests of the batch end.
      asked.may_be_unavailable =
          turns_ != nullptr && asked.waiting_rows() > 0 && batch.version->NumHealthy() == 0;
      asked.is_failing = true;
      MakeDue(asked, status.code());
      if (absl::IsResourceExhausted(status)) {
        asked.due_hint = head.rate.RetryAfter(static_cast<double>(num_rows));
      }
      continue;
    }
    asked.rows_scored += part.num_rows;
    if (asked.next_row == asked.request.rows && asked.parts_in_flight == 0) {
      const bool is_rejected = asked.request.reject_nonfinite && asked.expected.nonfinite_rows > 0;
      MakeDue(asked, is_rejected ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kOk);
    }
  }
  if (all_scored && batch.version == head.live) {
    head.rate.Add(num_rows, std::max<int64_t>(head.options.batch_rows_max / 4, 1), batch.started,
                  now, batch.replica);
  }
  replica.last_batch = now - replica.busy_since;
  replica.busy_since = --replica.in_flight == 0 ? absl::InfiniteFuture() : now;
}

void BatcherMixture::EndLostPieces() {
  for (const auto& head : heads_) {
    for (const auto& version : head->versions) {
      for (Replica& replica : version->members) {
        while (!replica.relaunches.empty() && !replica.engine->healthy()) {
          const Flight lost = replica.relaunches.front();
          replica.relaunches.erase(replica.relaunches.begin());
          EndPiece(replica, lost, absl::UnavailableError("lost"));
        }
      }
    }
  }
}

}  // namespace logprobd::testing
