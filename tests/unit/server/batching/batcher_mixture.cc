#include "tests/unit/server/batching/batcher_mixture.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/base/errors.h"
#include "server/batching/launch_rule.h"
#include "tests/support/test_requests.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kVocabSize = 1'000;

/// Returns the payload of a request: each row begins with `id` and its own number in 16 bits each,
/// by which an engine that gets the row can tell it.
HiddenPayload MarkedRows(int id, const RequestSpec& spec, Draws& draws) {
  const auto row_bytes = static_cast<size_t>(spec.hidden_size * DtypeBytes(spec.dtype));
  auto bytes = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(spec.rows) * row_bytes);
  for (size_t row = 0; row < static_cast<size_t>(spec.rows); ++row) {
    std::byte* const begin = bytes->data() + row * row_bytes;
    const auto marks = std::array{static_cast<uint16_t>(id), static_cast<uint16_t>(row)};
    std::memcpy(begin, marks.data(), sizeof(marks));
    for (size_t i = sizeof(marks); i < row_bytes; ++i) {
      begin[i] = static_cast<std::byte>(draws.Between(0, 0x3F));
    }
  }
  for (const int64_t row : spec.nonfinite_rows) {
    const size_t end = (static_cast<size_t>(row) + 1) * row_bytes;
    std::fill_n(bytes->data() + end - 4, 4, std::byte{0xFF});
  }
  HiddenPayload payload;
  payload.bytes = static_cast<int64_t>(bytes->size());
  payload.place = spec.place;
  payload.gpu = spec.gpu;
  const bool is_message = spec.place == PayloadPlace::kMessage;
  const size_t piece = is_message ? static_cast<size_t>(draws.Between(1, 40)) : bytes->size();
  for (size_t begin = 0; begin < bytes->size(); begin += piece) {
    payload.pieces.push_back(absl::MakeConstSpan(*bytes).subspan(begin, piece));
  }
  payload.owner = std::move(bytes);
  return payload;
}

}  // namespace

void HeldEngine::Start(ScoreBatch& batch, ScoreDone done) {
  on_start_(batch);
  fake_.Start(batch, [this, done = std::move(done)](absl::Status status) mutable {
    std::move(done)(std::move(status));
    const absl::MutexLock lock(&mutex_);
    ++num_ended_;
  });
}

void HeldEngine::End(const absl::Status& status) {
  if (!status.ok()) fake_.FailNext(status);
  const absl::MutexLock lock(&mutex_);
  const auto has_ended = [this, number = ++num_released_]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return num_ended_ >= number; };
  fake_.ReleaseOne();
  LOGPROBD_CHECK(mutex_.AwaitWithTimeout(absl::Condition(&has_ended), absl::Minutes(1)), "no end");
}

BatcherMixture::BatcherMixture(uint32_t seed, int num_heads)
    : draws_(seed),
      metrics_({.heads = num_heads == 1 ? std::vector<std::string>{"head0"}
                                        : std::vector<std::string>{"head0", "head1", "head2"},
                .version = "test",
                .commit = "test"}),
      start_draws_(seed) {
  for (int index = 0; index < num_heads; ++index) {
    heads_.push_back(std::make_unique<Head>());
    heads_.back()->index = index;
    MakeHead(*heads_.back(), num_heads);
  }
  if (num_heads > 1) {
    std::vector<DeviceTurns::Head> turn_heads;
    for (const auto& head : heads_) {
      turn_heads.push_back(
          {.lanes = head->lanes, .row_cost = static_cast<double>(draws_.Between(1, 4)) * 1e8});
    }
    turns_ = std::make_unique<DeviceTurns>(turn_heads);
  }
  for (const auto& head : heads_) {
    head->options.turns = turns_.get();
    head->options.turns_head = head->index;
    head->live = MakeVersion(*head);
    head->live_number = head->live->number;
    head->kind = head->live->replicas->kind;
    auto batcher = Batcher::Create(head->options, *head->live->replicas, clock_, metrics_);
    LOGPROBD_CHECK(batcher.ok(), batcher.status().message());
    head->batcher = *std::move(batcher);
    ++num_threads_;
  }
  Settle();
}

BatcherMixture::~BatcherMixture() {
  for (const auto& head : heads_) {
    if (head->batcher == nullptr) continue;
    Settle();
    // After a failure, the other batches must end, for which Stop waits.
    std::thread stop([&head] { head->batcher->Stop(); });
    while (Replica* const replica = AwaitFlight(*head)) EndBatch(*replica, absl::OkStatus());
    stop.join();
    --num_threads_;
    head->batcher = nullptr;
  }
}

void BatcherMixture::DrawLimits(Batcher::Options& options) {
  constexpr absl::Duration kWaits[] = {absl::ZeroDuration(), absl::Microseconds(500),
                                       absl::Milliseconds(20), absl::Seconds(2)};
  constexpr int64_t kRows[] = {60, 400, 1'500, 20'000};
  constexpr int64_t kBytes[] = {9'000, 60'000, 1 << 30};
  constexpr int64_t kRequests[] = {4, 20, 1'000};
  constexpr double kShares[] = {0.3, 0.6, 1};
  options.batch_wait_max = draws_.OneOf(kWaits);
  options.queue_rows_max = draws_.OneOf(kRows);
  options.queue_bytes_max = draws_.OneOf(kBytes);
  options.queue_requests_max = draws_.OneOf(kRequests);
  options.client_share_max = draws_.OneOf(kShares);
}

void BatcherMixture::MakeHead(Head& head, int num_heads) {
  constexpr int64_t kBatchRows[] = {1, 5, 32, 64, 300, 1'024};
  constexpr int64_t kSteps[] = {1, 1, 1, 8, 16};
  head.name = absl::StrCat("head", head.index);
  const bool is_team = draws_.Chance(30);
  const int64_t num_replicas = draws_.Between(1, num_heads == 1 ? 3 : 2);
  for (int64_t i = 0; i < num_replicas; ++i) {
    std::vector<std::string> devices = {"gpu0", "gpu1"};
    if (!is_team) devices.erase(devices.begin() + draws_.Between(0, 1));
    head.lanes.push_back({.devices = std::move(devices), .waits_for_peers = is_team});
  }
  head.engine = FakeEngine::Options{.batch_rows_max = 1'024,
                                    .hidden_size = kHiddenSize,
                                    .vocab_size = kVocabSize,
                                    .reads_in_place = draws_.Chance(60),
                                    .row_step = draws_.OneOf(kSteps),
                                    .record = false};
  if (is_team) {
    head.engine.layout = {{.shard = 0, .device = "gpu0"}, {.shard = 1, .device = "gpu1"}};
  }
  head.options.batch_rows_max = draws_.OneOf(kBatchRows);
  head.options.copy_threads = 0;
  head.options.answer_threads = draws_.Chance(30) ? 2 : 0;
  head.options.head = head.name;
  head.options.staging = &head.staging;
  head.options.heartbeats = &heartbeats_;
  DrawLimits(head.options);
}

BatcherMixture::Version* BatcherMixture::MakeVersion(Head& head) {
  auto version = std::make_unique<Version>();
  version->head = &head;
  version->number = head.last_number++;
  version->waits_for_peers = WaitsForPeers(head.engine.layout);
  FakeEngine::Options options = head.engine;
  options.weights_version = version->number;
  options.logprob_offset = OffsetOf(version->number);
  options.dtype = draws_.Chance(80) ? Dtype::kBf16 : Dtype::kF16;
  std::vector<ScoringEngine*> engines;
  version->members.resize(head.lanes.size());
  for (size_t replica = 0; replica < head.lanes.size(); ++replica) {
    version->members[replica].engine = std::make_unique<HeldEngine>(
        options, [this, made = version.get(), replica](const ScoreBatch& batch) {
          OnStart(*made, replica, batch);
        });
    engines.push_back(version->members[replica].engine.get());
  }
  auto replicas = VersionReplicas::Create(head.options, engines);
  LOGPROBD_CHECK(replicas.ok(), replicas.status().message());
  version->replicas = *std::move(replicas);
  head.versions.push_back(std::move(version));
  return head.versions.back().get();
}

std::unique_ptr<BatcherMixture::Asked> BatcherMixture::MakeAsked(Head& head) {
  constexpr const char* kClients[] = {"a", "b", "c", "team"};
  constexpr const char* kMembers[] = {"x", "y"};
  constexpr int64_t kSizes[] = {1, 5, 20, 20, 256, 257, 700};
  constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kBf16, Dtype::kF32, Dtype::kF16};
  RequestSpec spec{.rows = draws_.Between(0, draws_.OneOf(kSizes)), .hidden_size = kHiddenSize};
  spec.seed = static_cast<uint32_t>(draws_.Between(1, 1'000'000));
  spec.client_id = draws_.OneOf(kClients);
  if (spec.client_id == "team") spec.sub_client_id = draws_.OneOf(kMembers);
  spec.priority = static_cast<Priority>(draws_.Between(0, 2));
  spec.dtype = draws_.OneOf(kDtypes);
  spec.top_k = draws_.Chance(20) ? draws_.Between(1, 3) : 0;
  if (draws_.Chance(50)) spec.outputs = OutputSet(static_cast<uint32_t>(draws_.Between(1, 511)));
  if (draws_.Chance(30)) spec.temperature = 0.5F;
  if (draws_.Chance(20)) spec.entropy_temperature = 2.0F;
  if (draws_.Chance(20)) {
    spec.place = PayloadPlace::kDevice;
    spec.gpu = 0;
  }
  const int64_t percent_ignored = draws_.Chance(50) ? 0 : draws_.Between(5, 100);
  for (int64_t row = 0; row < spec.rows; ++row) {
    if (draws_.Chance(percent_ignored)) spec.ignored_rows.push_back(row);
    if (draws_.Between(1, 200) == 1) spec.nonfinite_rows.push_back(row);
  }
  if (spec.rows > 0 && spec.rows <= 10 && draws_.Chance(20)) {
    for (int64_t row = 0; row < spec.rows; ++row) {
      spec.candidate_counts.push_back(draws_.Between(0, 3));
    }
  }
  spec.reject_nonfinite = draws_.Chance(30);
  if (draws_.Chance(40)) {
    constexpr absl::Duration kTimes[] = {absl::ZeroDuration(),    absl::Nanoseconds(1),
                                         absl::Milliseconds(3),   absl::Milliseconds(21),
                                         absl::Milliseconds(200), absl::Seconds(4)};
    spec.deadline = clock_.Now() + draws_.OneOf(kTimes);
  }

  auto asked = std::make_unique<Asked>();
  asked->id = static_cast<int>(asked_.size());
  asked->head = &head;
  asked->request = MakeRequest(spec);
  asked->request.hidden = MarkedRows(asked->id, spec, draws_);
  for (int32_t& target : asked->request.targets) {
    const bool is_ignored = target == asked->request.ignore_index;
    if (!is_ignored && draws_.Chance(10)) target = asked->id % kVocabSize;  // FakeEngine's argmax.
  }
  if (draws_.Chance(10)) asked->request.client_share = 0.5;
  if (draws_.Chance(15)) {
    asked->request.weights_version = head.live_number + (draws_.Chance(20) ? 1 : 0);
  }
  asked->expected = ExpectedResult(asked->request, kVocabSize);
  asked->payload = asked->request.hidden.owner;
  asked->payload_bytes = PayloadBytes(asked->request);
  asked->held_bytes = FieldBytes(asked->request) + AnswerBytes(asked->request);
  asked->rows_to_score = spec.rows - static_cast<int64_t>(spec.ignored_rows.size());
  asked->is_on_gpu = spec.place == PayloadPlace::kDevice;
  return asked;
}

void BatcherMixture::Step() {
  Head& head = *draws_.OneOf(heads_);
  const bool is_lost = head.live == nullptr || head.live->NumHealthy() == 0;
  switch (draws_.ByWeight({42, 26, 14, 6, 3, 1, is_lost ? 20 : 5})) {
    case 0:
      Submit(head);
      break;
    case 1:
      EndSomeBatch(head);
      break;
    case 2:
      Advance(SomeStep(head));
      break;
    case 3:
      Cancel(head);
      break;
    case 4:
      SetLimits(head);
      break;
    case 5:
      Lose(head);
      break;
    default:
      ChangeVersion(head);
  }
  Settle();
  Check();
}

void BatcherMixture::Submit(Head& head) {
  std::unique_ptr<Asked> made = MakeAsked(head);
  Asked& asked = *made;
  ScoreRequest request = asked.request;
  asked.request.hidden = HiddenPayload();
  asked.SkipIgnoredRows();
  asked.submitted = clock_.Now();
  asked.number = head.live_number;
  Note(absl::StrCat(head.name, ": submit ", asked.id, " with ", asked.rows_to_score, " of ",
                    request.rows, " rows of ", request.client_id, request.sub_client_id,
                    ", deadline in ", absl::FormatDuration(request.deadline - clock_.Now())));
  Prediction prediction;
  absl::Time last_small = absl::InfinitePast();
  {
    // The batch thread may have the request before Submit returns.
    const absl::MutexLock lock(&mutex_);
    prediction = Predict(head, asked);
    asked_.push_back(std::move(made));
    head.active.push_back(&asked);
    if (asked.rows_to_score == 0) asked.due = absl::StatusCode::kOk;
    if (head.live != nullptr) last_small = head.live->last_small;
    if (head.live != nullptr && asked.is_small() && asked.rows_to_score > 0) {
      head.live->last_small = clock_.Now();
    }
  }
  const absl::StatusOr<RequestTicket> ticket =
      head.batcher->Submit(std::move(request), [this, &asked](absl::StatusOr<ScoreResult> result) {
        const absl::MutexLock lock(&mutex_);
        EXPECT_FALSE(asked.answer.has_value()) << "request " << asked.id << " is answered twice";
        asked.answer = std::move(result);
        asked.answered = clock_.Now();
      });

  const absl::MutexLock lock(&mutex_);
  if (ticket.ok()) {
    asked.ticket = *ticket;
    EXPECT_EQ(prediction.code, absl::StatusCode::kOk) << "request " << asked.id;
    if (!head.unpublished_since.has_value()) head.unpublished_since = clock_.Now();
    return;
  }
  const absl::Status& refusal = ticket.status();
  if (prediction.may_be_late && absl::IsDeadlineExceeded(refusal)) {
    prediction = {.code = absl::StatusCode::kDeadlineExceeded};
  }
  EXPECT_EQ(refusal.code(), prediction.code) << refusal;
  EXPECT_EQ(RejectionOf(refusal), prediction.reason.value_or(RejectionOf(refusal))) << refusal;
  const std::optional<absl::Duration> hint = RetryAfter(refusal);
  EXPECT_EQ(hint.has_value(), prediction.hint.has_value()) << refusal;
  if (hint.has_value() && prediction.hint.has_value()) {
    EXPECT_GE(*hint, DrainRate::kRetryAfterMin);
    EXPECT_LE(*hint, DrainRate::kRetryAfterMax);
    EXPECT_TRUE(IsNear(*hint, *prediction.hint))
        << refusal << ": " << *hint << ", not " << *prediction.hint;
  }
  if (absl::IsDeadlineExceeded(refusal)) ++num_late_[0];
  EXPECT_FALSE(asked.answer.has_value()) << "refused and answered";
  EXPECT_TRUE(asked.payload.expired());
  if (head.live != nullptr) head.live->last_small = last_small;
  head.active.pop_back();
  asked_.pop_back();
}

void BatcherMixture::EndBatch(Replica& replica, const absl::Status& status) {
  {
    const absl::MutexLock lock(&mutex_);
    const Flight flight = replica.flights.front();
    replica.flights.pop_front();
    Head& head = *flight.batch->version->head;
    EndPiece(replica, flight, status);
    MakeUnservableDue(head);  // The end of a batch wakes the batch thread.
    head.unpublished_since = std::nullopt;
  }
  replica.engine->End(status);
}

void BatcherMixture::EndSomeBatch(Head& head) {
  std::vector<Replica*> busy;
  for (const auto& version : head.versions) {
    for (Replica& replica : version->members) {
      if (!replica.flights.empty()) busy.push_back(&replica);
    }
  }
  if (busy.empty()) return;
  const absl::Status kEnds[] = {absl::OkStatus(), absl::ResourceExhaustedError("does not fit"),
                                absl::InternalError("fault"), absl::UnavailableError("lost")};
  const absl::Status& status = kEnds[draws_.ByWeight({85, 8, 5, 2})];
  Note(absl::StrCat(head.name, ": a batch ends with ", status.ToString()));
  EndBatch(*draws_.OneOf(busy), status);
}

void BatcherMixture::Cancel(Head& head) {
  RequestTicket ticket = 0;
  {
    const absl::MutexLock lock(&mutex_);
    if (head.active.empty()) return;
    Asked& asked = *draws_.OneOf(head.active);
    ticket = asked.ticket;
    if (!asked.due.has_value()) {
      const bool is_late = clock_.Now() + kDeadlineSlack >= asked.request.deadline;
      if (!is_late) ++num_cancelled_[asked.waiting_rows() > 0 ? kQueue : kEngine];
      MakeDue(asked, is_late ? absl::StatusCode::kDeadlineExceeded : absl::StatusCode::kCancelled);
      head.unpublished_since = std::nullopt;
    }
  }
  Note(absl::StrCat(head.name, ": cancel ticket ", ticket));
  head.batcher->Cancel(ticket);
}

void BatcherMixture::Advance(absl::Duration step) {
  Note(absl::StrCat("advance by ", absl::FormatDuration(step)));
  {
    const absl::MutexLock lock(&mutex_);
    const absl::Time now = clock_.Now() + step;
    for (const auto& head : heads_) {
      for (Asked* asked : head->active) {
        if (!asked->due.has_value() && asked->request.deadline <= now) {
          MakeDue(*asked, absl::StatusCode::kDeadlineExceeded);
          head->unpublished_since = std::nullopt;
        }
      }
    }
  }
  clock_.Advance(step);
}

/// Returns the time until something becomes due, a nanosecond less, or any other time.
absl::Duration BatcherMixture::SomeStep(const Head& head) {
  constexpr absl::Duration kSteps[] = {absl::Microseconds(50),  absl::Milliseconds(1),
                                       absl::Milliseconds(7),   absl::Milliseconds(100),
                                       absl::Milliseconds(999), absl::Seconds(6)};
  std::vector<absl::Time> times;
  {
    const absl::MutexLock lock(&mutex_);
    for (const Asked* asked : head.active) {
      times.push_back(asked->request.deadline);
      times.push_back(asked->submitted + head.options.batch_wait_max);
      times.push_back(asked->submitted + kGaugePeriod);
    }
    for (const auto& version : head.versions) {
      for (const Replica& replica : version->members) {
        times.push_back(replica.busy_since + replica.last_batch - LaunchRule::kPrepareTime);
      }
    }
  }
  const absl::Time now = clock_.Now();
  absl::Duration step = draws_.OneOf(kSteps);
  if (!times.empty() && draws_.Chance(60)) {
    const absl::Duration until = draws_.OneOf(times) - now;
    if (until > absl::Nanoseconds(1) && until < absl::Hours(1)) step = until;
  }
  return draws_.Chance(30) ? step - absl::Nanoseconds(1) : step;
}

void BatcherMixture::SetLimits(Head& head) {
  Batcher::Options options;
  {
    const absl::MutexLock lock(&mutex_);
    DrawLimits(head.options);
    options = head.options;
    head.unpublished_since = std::nullopt;
  }
  Note(absl::StrCat(head.name, ": at most ", options.queue_rows_max, " rows, ",
                    options.queue_bytes_max, " bytes, wait ",
                    absl::FormatDuration(options.batch_wait_max)));
  EXPECT_TRUE(head.batcher->SetLimits(options).ok());
}

void BatcherMixture::Lose(Head& head) {
  Version* const version = draws_.OneOf(head.versions).get();
  Replica& replica = draws_.OneOf(version->members);
  Note(absl::StrCat(head.name, ": a replica of version ", version->number, " is lost"));
  replica.engine->SetHealthy(false);
  if (!replica.flights.empty()) {
    EndBatch(replica, absl::InternalError("device lost"));
    return;
  }
  {
    const absl::MutexLock lock(&mutex_);
    MakeUnservableDue(head);
    head.unpublished_since = std::nullopt;
  }
  EXPECT_TRUE(head.batcher->SetLimits(head.options).ok());  // Wakes the batch thread.
}

void BatcherMixture::ChangeVersion(Head& head) {
  if (head.must_await) {
    AwaitRetired(head);
    return;
  }
  const bool fails = head.live == nullptr && draws_.Chance(30);
  if (fails) {
    Note(absl::StrCat(head.name, ": fail"));
    {
      const absl::MutexLock lock(&mutex_);
      head.failure = absl::UnavailableError("no weights");
      for (Asked* asked : head.active) {
        if (asked->waiting_rows() > 0) MakeDue(*asked, absl::StatusCode::kUnavailable);
      }
      head.unpublished_since = std::nullopt;
    }
    head.batcher->Fail(head.failure);
    return;
  }
  Version* next = nullptr;
  if (head.live == nullptr || draws_.Chance(80)) {
    const bool is_rollback = head.versions.size() > 1 && draws_.Chance(30);
    if (is_rollback) {
      next = head.versions[head.versions.front().get() == head.live ? 1 : 0].get();
    } else {
      next = MakeVersion(head);
    }
  }
  Commit(head, next);
}

void BatcherMixture::Commit(Head& head, Version* next) {
  Note(absl::StrCat(head.name, ": commit version ", next == nullptr ? 0 : next->number));
  {
    const absl::MutexLock lock(&mutex_);
    head.retiring = std::exchange(head.live, next);
    head.must_await = true;
    head.failure = absl::OkStatus();
    if (head.retiring != nullptr) {
      for (Asked* asked : head.active) {
        const bool is_bound = asked->version != nullptr || asked->request.weights_version != 0;
        if (asked->waiting_rows() > 0 && is_bound) asked->is_retiring = true;
      }
    }
    if (next != nullptr) {
      head.live_number = next->number;
      if (std::exchange(head.kind, next->replicas->kind) != head.kind) head.rate = Rate();
    }
    MakeUnservableDue(head);
    head.unpublished_since = std::nullopt;
  }
  head.batcher->Commit(next == nullptr ? nullptr : next->replicas.get());
}

void BatcherMixture::AwaitRetired(Head& head) {
  bool is_retired = false;
  {
    const absl::MutexLock lock(&mutex_);
    is_retired = head.retiring == nullptr || (WaitingFor(head, /*is_retiring=*/true).rows == 0 &&
                                              head.retiring->NumInFlight() == 0);
  }
  Note(absl::StrCat(head.name, ": await the end of the old version: ", is_retired));
  EXPECT_EQ(head.batcher->AwaitRetired(clock_.Now()), is_retired);
  if (!is_retired) return;
  Settle();
  const absl::MutexLock lock(&mutex_);
  head.unpublished_since = std::nullopt;
  head.must_await = false;
  head.retiring = nullptr;
  // At most one version is kept beside the live one.
  while (head.versions.size() > 2 || (head.versions.size() > 1 && draws_.Chance(50))) {
    const auto dropped = absl::c_find_if(
        head.versions, [&head](const auto& version) { return version.get() != head.live; });
    head.versions.erase(dropped);
  }
}

void BatcherMixture::InterfereWithStart(Head& head) {
  const absl::Status kEnds[] = {absl::OkStatus(), absl::ResourceExhaustedError("does not fit"),
                                absl::InternalError("fault")};
  Replica* ends = nullptr;
  absl::Status status;
  RequestTicket cancelled = 0;
  absl::Duration step;
  {
    const absl::MutexLock lock(&mutex_);
    if (!start_draws_.Chance(12)) return;
    std::vector<Replica*> replicas;
    for (const auto& version : head.versions) {
      for (Replica& replica : version->members) replicas.push_back(&replica);
    }
    Replica& replica = *start_draws_.OneOf(replicas);
    switch (start_draws_.Between(0, 3)) {
      case 0:
        // The last one may be the batch that is being started.
        if (replica.flights.size() > 1) {
          ends = &replica;
          status = start_draws_.OneOf(kEnds);
        }
        break;
      case 1:
        if (start_draws_.Chance(30)) {
          events_.emplace_back("  meanwhile a replica is lost");
          replica.engine->SetHealthy(false);
          MakeUnservableDue(head);
        }
        break;
      case 2:
        if (heads_.size() == 1) step = absl::Microseconds(start_draws_.Between(1, 30'000));
        break;
      default:
        if (Asked& asked = *start_draws_.OneOf(head.active); !asked.due.has_value()) {
          cancelled = asked.ticket;  // 0 as long as Submit has not returned it.
          if (cancelled == 0) break;
          const bool is_late = clock_.Now() + kDeadlineSlack >= asked.request.deadline;
          if (!is_late) ++num_cancelled_[asked.waiting_rows() > 0 ? kQueue : kEngine];
          MakeDue(asked,
                  is_late ? absl::StatusCode::kDeadlineExceeded : absl::StatusCode::kCancelled);
        }
    }
  }
  if (ends != nullptr) {
    Note(absl::StrCat("  meanwhile a batch ends with ", status.ToString()));
    EndBatch(*ends, status);
  }
  if (cancelled != 0) {
    Note(absl::StrCat("  meanwhile cancel ticket ", cancelled));
    head.batcher->Cancel(cancelled);
  }
  if (step > absl::ZeroDuration()) Advance(step);
}

}  // namespace logprobd::testing
