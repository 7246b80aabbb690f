// The checks of BatcherMixture, and the end of its Batchers.

#include <algorithm>
#include <array>
#include <thread>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "tests/support/test_requests.h"
#include "tests/unit/server/batching/batcher_mixture.h"

namespace logprobd::testing {
namespace {

constexpr size_t kEventsShown = 40;
constexpr const char* kPriorities[] = {"high", "normal", "low"};
constexpr const char* kStages[] = {"arrival", "queue", "engine"};

}  // namespace

void BatcherMixture::Settle() {
  clock_.WaitUntilAsleep(num_threads_);
  const absl::MutexLock lock(&mutex_);
  EndLostPieces();
}

void BatcherMixture::Check() {
  const MetricsSnapshot snapshot = metrics_.Snapshot();
  for (const std::shared_ptr<const Heartbeat>& heartbeat : heartbeats_.All()) {
    EXPECT_FALSE(heartbeat->is_at_work()) << "a thread that sleeps seems to work";
  }
  const absl::MutexLock lock(&mutex_);
  int64_t bytes = 0;
  bool is_published = true;
  for (const auto& head : heads_) {
    CheckAnswers(*head);
    CheckLaunches(*head);
    CheckMetrics(*head, snapshot);
    is_published = is_published && !head->unpublished_since.has_value();
    for (const Asked* asked : head->active) {
      bytes += asked->load().bytes;
      EXPECT_EQ(asked->payload.expired(), asked->load().requests == 0) << asked->id;
    }
    const int64_t staging = head->live == nullptr ? 0 : head->live->replicas->staging_bytes();
    EXPECT_EQ(head->batcher->memory().front().bytes, staging);
    std::erase_if(head->active, [](const Asked* asked) { return asked->has_ended(); });
  }
  EXPECT_TRUE(!is_published ||
              snapshot.Sum("logprobd_inflight_bytes") == static_cast<double>(bytes))
      << bytes;
  CheckCounters(snapshot);
}

void BatcherMixture::CheckAnswers(Head& head) {
  for (Asked* asked : head.active) {
    const std::string what = absl::StrCat("request ", asked->id, " of ", asked->head->name);
    EXPECT_EQ(asked->answer.has_value(), asked->due.has_value())
        << what << (asked->answer.has_value() ? " has " + asked->answer->status().ToString() : "");
    if (!asked->answer.has_value() || !asked->due.has_value()) continue;
    const absl::Status status = asked->answer->status();
    if (asked->may_be_unavailable && absl::IsUnavailable(status)) {
      asked->due_hint = std::nullopt;
    } else {
      EXPECT_EQ(status.code(), *asked->due) << what << " has " << status;
    }
    if (absl::IsDeadlineExceeded(status)) {
      EXPECT_GE(asked->answered + kDeadlineSlack, asked->request.deadline) << what;
    }
    EXPECT_EQ(RetryAfter(status).has_value(), asked->due_hint.has_value()) << what;
    if (asked->due_hint.has_value() && RetryAfter(status).has_value()) {
      EXPECT_TRUE(IsNear(*RetryAfter(status), *asked->due_hint)) << what;
    }
    if (asked->answer->ok()) {
      EXPECT_EQ(Differences(**asked->answer, asked->Result()), "") << what;
    }
  }
}

void BatcherMixture::CheckLaunches(const Head& head) {
  for (const auto& version : head.versions) {
    for (const Replica& replica : version->members) {
      EXPECT_TRUE(replica.relaunches.empty()) << "a half of a batch waits";
    }
  }
  const bool live_waits = head.live != nullptr && WaitingFor(head, false).rows > 0;
  const bool retiring_waits = head.retiring != nullptr && WaitingFor(head, true).rows > 0;
  if (heads_.size() > 1) {
    int in_flight = 0;
    for (const auto& other : heads_) {
      for (const auto& version : other->versions) in_flight += version->NumInFlight();
    }
    EXPECT_FALSE(in_flight == 0 && (live_waits || retiring_waits)) << "rows wait for nothing";
    return;
  }
  if (VersionsTakeTurns(head)) {
    const int in_flight = head.live->NumInFlight() + head.retiring->NumInFlight();
    EXPECT_FALSE(in_flight == 0 && (live_waits || retiring_waits)) << "rows wait for nothing";
    return;
  }
  EXPECT_FALSE(MustLaunch(head)) << "rows wait although a batch is due";
  EXPECT_FALSE(retiring_waits && head.retiring->FewestInFlight().has_value())
      << "rows of the old version wait beside a free slot";
}

void BatcherMixture::CheckMetrics(Head& head, const MetricsSnapshot& metrics) {
  std::array<QueueLoad, kNumPriorities> loads;
  for (const Asked* asked : head.active) {
    loads[static_cast<size_t>(asked->request.priority())] += asked->load();
  }
  std::vector<std::string> wrong;
  for (size_t i = 0; i < loads.size(); ++i) {
    const MetricsSnapshot::Labels labels = {{"head", head.name}, {"priority", kPriorities[i]}};
    const std::pair<const char*, int64_t> gauges[] = {
        {"rows", loads[i].rows}, {"bytes", loads[i].bytes}, {"requests", loads[i].requests}};
    for (const auto& [name, value] : gauges) {
      const double published = metrics.Sum(absl::StrCat("logprobd_queue_", name), labels);
      if (published != static_cast<double>(value)) {
        wrong.push_back(absl::StrCat(kPriorities[i], " ", name, ": ", published, ", not ", value));
      }
    }
  }
  const absl::Time now = clock_.Now();
  if (wrong.empty()) {
    head.unpublished_since = std::nullopt;
  } else {
    EXPECT_TRUE(head.unpublished_since.has_value() && now - *head.unpublished_since < kGaugePeriod)
        << head.name << ": " << absl::StrJoin(wrong, "; ");
  }

  const absl::Time oldest = std::min(WaitingFor(head, false).oldest, WaitingFor(head, true).oldest);
  const double age = metrics.Sum("logprobd_queue_oldest_age_seconds", {{"head", head.name}});
  if (oldest == absl::InfiniteFuture()) {
    EXPECT_EQ(age, 0) << head.name;
  } else {
    const absl::Duration behind = now - oldest - absl::Seconds(age);
    EXPECT_GE(behind, -absl::Nanoseconds(1)) << head.name << ": the age is " << age;
    EXPECT_LT(behind, kGaugePeriod) << head.name << ": the age is " << age;
  }
}

void BatcherMixture::CheckCounters(const MetricsSnapshot& metrics) {
  for (size_t i = 0; i < num_late_.size(); ++i) {
    const MetricsSnapshot::Labels stage = {{"stage", kStages[i]}};
    EXPECT_EQ(metrics.Sum("logprobd_deadline_exceeded_total", stage),
              static_cast<double>(num_late_[i]))
        << kStages[i];
    EXPECT_EQ(metrics.Sum("logprobd_cancelled_total", stage),
              static_cast<double>(num_cancelled_[i]))
        << kStages[i];
  }
  for (const auto& head : heads_) {
    const HistogramCounts batches =
        metrics.Histogram("logprobd_batch_rows", {{"head", head->name}});
    EXPECT_EQ(batches.sum, static_cast<double>(head->started_rows));
    EXPECT_EQ(batches.count(), static_cast<uint64_t>(head->started_batches));
  }
}

void BatcherMixture::CheckNothingIsHeld() {
  const MetricsSnapshot snapshot = metrics_.Snapshot();
  for (const auto& asked : asked_) {
    EXPECT_TRUE(asked->answer.has_value()) << "request " << asked->id << " has no answer";
    EXPECT_TRUE(asked->payload.expired()) << "the rows of request " << asked->id << " are held";
  }
  for (const char* name : {"rows", "bytes", "requests", "oldest_age_seconds"}) {
    EXPECT_EQ(snapshot.Sum(absl::StrCat("logprobd_queue_", name)), 0) << name;
  }
  EXPECT_EQ(snapshot.Sum("logprobd_inflight_bytes"), 0);
  // Each replica can have both of its turns, one after another.
  for (const auto& head : heads_) {
    for (size_t lane = 0; turns_ != nullptr && lane < head->lanes.size(); ++lane) {
      const auto replica = static_cast<int>(lane);
      for (int turn = 0; turn < ScoringEngine::kBatchesInFlight; ++turn) {
        EXPECT_TRUE(turns_->Take(head->index, {replica}).has_value()) << head->name << " " << lane;
        turns_->Withdraw(head->index);
      }
      for (int turn = 0; turn < ScoringEngine::kBatchesInFlight; ++turn) {
        turns_->GiveBack(head->index, replica);
      }
    }
  }
}

void BatcherMixture::End() {
  const int64_t way = draws_.Between(0, 2);
  const auto end_all = [this] {
    for (bool any = true; any;) {  // The end of a batch may let another head start one.
      any = false;
      for (const auto& head : heads_) {
        while (Replica* const replica = AwaitFlight(*head)) {
          EndBatch(*replica, absl::OkStatus());
          Settle();
          any = true;
        }
      }
    }
  };
  if (way == 0) {
    Note("end all batches and drain");
    end_all();
    for (const auto& head : heads_) {
      if (head->must_await) AwaitRetired(*head);
      if (head->live == nullptr) {
        const absl::MutexLock lock(&mutex_);
        for (Asked* asked : head->active) {
          if (!asked->due.has_value()) MakeDue(*asked, absl::StatusCode::kUnavailable);
        }
      }
      if (head->live == nullptr) head->batcher->Fail(absl::UnavailableError("no weights"));
    }
    Settle();
    Check();
    for (const auto& head : heads_) {
      EXPECT_TRUE(head->batcher->Drain(clock_.Now())) << head->name << " still has work";
    }
  } else if (way == 1) {
    Note("abandon all");
    for (const auto& head : heads_) {
      {
        const absl::MutexLock lock(&mutex_);
        for (Asked* asked : head->active) {
          if (!asked->due.has_value()) MakeDue(*asked, absl::StatusCode::kUnavailable);
        }
      }
      head->batcher->Abandon(absl::UnavailableError("the server hangs"));
      const absl::MutexLock lock(&mutex_);
      CheckAnswers(*head);
    }
    Settle();
    end_all();
    for (const auto& head : heads_) {
      EXPECT_TRUE(head->batcher->Drain(clock_.Now())) << head->name << " still has work";
    }
  }
  for (const auto& head : heads_) {
    Settle();  // The other heads go on while this one stops.
    Note(absl::StrCat(head->name, ": stop"));
    {
      const absl::MutexLock lock(&mutex_);
      for (Asked* asked : head->active) {
        if (asked->waiting_rows() > 0) MakeDue(*asked, absl::StatusCode::kUnavailable);
      }
    }
    std::thread stop([&head] { head->batcher->Stop(); });
    {
      const auto has_stopped = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return absl::c_all_of(head->active, [](const Asked* asked) {
          return asked->answer.has_value() || !asked->due.has_value();
        });
      };
      const absl::MutexLock lock(&mutex_);
      EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&has_stopped), kWaitMax));
    }
    while (Replica* const replica = AwaitFlight(*head)) EndBatch(*replica, absl::OkStatus());
    stop.join();
    --num_threads_;
    head->batcher = nullptr;
    const absl::MutexLock lock(&mutex_);
    CheckAnswers(*head);
    head->active.clear();
    head->versions.clear();
  }
  CheckNothingIsHeld();
}

BatcherMixture::Replica* BatcherMixture::AwaitFlight(Head& head) {
  const absl::MutexLock lock(&mutex_);
  EndLostPieces();
  std::vector<Replica*> replicas;
  int in_flight = 0;
  for (const auto& version : head.versions) {
    in_flight += version->NumInFlight();
    for (Replica& replica : version->members) replicas.push_back(&replica);
  }
  if (in_flight == 0) return nullptr;
  const auto has_flight = [](const Replica* replica) { return !replica->flights.empty(); };
  const auto any_has = [&] { return absl::c_any_of(replicas, has_flight); };
  LOGPROBD_CHECK(mutex_.AwaitWithTimeout(absl::Condition(&any_has), kWaitMax), in_flight);
  return *absl::c_find_if(replicas, has_flight);
}

void BatcherMixture::Note(std::string event) {
  const absl::MutexLock lock(&mutex_);
  events_.push_back(std::move(event));
  while (events_.size() > kEventsShown) events_.pop_front();
}

std::string BatcherMixture::LastEvents() const {
  const absl::MutexLock lock(&mutex_);
  return absl::StrJoin(events_, "\n  ");
}

}  // namespace logprobd::testing
