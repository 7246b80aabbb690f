#include "server/app/heads/head_versions.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/app/heads/plan.h"
#include "server/app/options/server_options.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/weights/content_check.h"

namespace logprobd {
namespace {

constexpr auto kVersionMax = static_cast<uint64_t>(kWeightsVersionMax);

absl::Status NotReleased() {
  return absl::UnavailableError(
      "the memory of a dropped version stays in use, because one of its replicas does not end its "
      "work: restart the server, or load again if there is room");
}

}  // namespace

/// The exclusive right to change versions. At most one call holds it at a time.
class HeadVersions::Change {
 public:
  explicit Change(HeadVersions& versions)
      : versions_(versions), is_holder_(!versions.is_changing_.exchange(true)) {}
  ~Change() {
    if (is_holder_) versions_.is_changing_ = false;
  }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

  absl::Status status() const {
    if (!is_holder_) {
      return absl::AbortedError(absl::StrCat("the weights of head \"", versions_.name(),
                                             "\" are being changed by another call"));
    }
    return versions_.is_stopped_ ? ShuttingDown() : absl::OkStatus();
  }

 private:
  HeadVersions& versions_;
  const bool is_holder_;
};

HeadVersions::HeadVersions(InProcessHead& head, VersionLoader loader, Options options,
                           Metrics& metrics)
    : head_(head),
      loader_(std::move(loader)),
      options_(std::move(options)),
      metrics_(metrics),
      releaser_(*options_.clock),
      unread_(head.weights()) {
  const std::shared_ptr<const HeadInfo> info = head.info();
  live_ = {.version = info->weights_version,
           .sha256 = "",
           .source = options_.source,
           .loaded_unix_seconds = absl::ToUnixSeconds(absl::Now()),
           .weight_bytes = info->weight_bytes,
           .dtype = info->dtype};
  const absl::MutexLock lock(&mutex_);
  numbers_.RecordLive(live_);
}

HeadVersions::~HeadVersions() = default;

absl::StatusOr<WeightsVersion> HeadVersions::Load(const WeightsLoad& load,
                                                  const LoadTicker::Progress& progress) {
  return LoadAs(
      load, [&](uint64_t number) { return loader_.Open(load, number, *head_.info()); }, progress);
}

absl::StatusOr<WeightsVersion> HeadVersions::LoadAs(const WeightsLoad& load,
                                                    const OpenCandidate& open,
                                                    const LoadTicker::Progress& progress) {
  const Change change(*this);
  LOGPROBD_RETURN_IF_ERROR(change.status());
  LoadTicker ticker(progress, is_stopped_);
  const auto load_candidate = [&]() -> absl::StatusOr<WeightsVersion> {
    LOGPROBD_RETURN_IF_ERROR(ticker.Report("checking", 0, 0));
    absl::StatusOr<uint64_t> number;
    {
      const absl::MutexLock lock(&mutex_);
      number = NumberOf(load.version);
    }
    LOGPROBD_RETURN_IF_ERROR(number.status());
    LOGPROBD_ASSIGN_OR_RETURN(VersionLoader::Candidate candidate, open(*number));
    {
      const absl::MutexLock lock(&mutex_);
      LOGPROBD_RETURN_IF_ERROR(CheckIsFree(*number));
    }
    return LoadCandidate(load, std::move(candidate), ticker);
  };
  absl::StatusOr<WeightsVersion> loaded = load_candidate();
  if (!loaded.ok()) RecordFailure(loaded.status());
  return loaded;
}

void HeadVersions::RecordFailure(const absl::Status& status) {
  const bool is_cancelled = absl::IsCancelled(status) || is_stopped_;
  metrics_.RecordWeightsSwap(
      name(), is_cancelled ? Metrics::WeightsSwap::kCancelled : Metrics::WeightsSwap::kFailed);
}

absl::StatusOr<WeightsVersion> HeadVersions::LoadCandidate(const WeightsLoad& load,
                                                           VersionLoader::Candidate candidate,
                                                           LoadTicker& ticker) {
  // The checks that change nothing come first.
  Planned planned;
  planned.candidate = std::move(candidate);
  LOGPROBD_ASSIGN_OR_RETURN(std::optional<LoadTurn::Holder> turn, AwaitTurn(ticker));
  LOGPROBD_ASSIGN_OR_RETURN(planned.plan, Plan(planned.candidate.weights->info(), load.in_place,
                                               MemoryToFree(load.in_place)));
  LOGPROBD_RETURN_IF_ERROR(loader_.CheckContent(load, planned.candidate, ticker));
  {
    const absl::MutexLock lock(&mutex_);
    const WeightsVersion& version = planned.candidate.version;
    LOGPROBD_RETURN_IF_ERROR(numbers_.CheckNames(version.version, version.sha256));
  }
  if (load.in_place) return ReplaceInPlace(std::move(planned), std::move(turn), ticker);
  absl::StatusOr<WeightsVersion> staged = Stage(planned, ticker);
  if (!staged.ok()) {
    NotifyChange();  // the staging that it took is spare now
  }
  if (!staged.ok() || !load.commit) return staged;
  // A commit takes no memory, and waits for the batches of the old version, which may never end.
  turn.reset();
  std::unique_ptr<VersionEngines> next;
  {
    const absl::MutexLock lock(&mutex_);
    next = std::move(staged_);
  }
  MakeLive(std::move(next), /*keeps_previous=*/true);
  metrics_.RecordWeightsSwap(name(), Metrics::WeightsSwap::kCommitted);
  return staged;
}

absl::StatusOr<uint64_t> HeadVersions::NumberOf(uint64_t requested) const {
  if (staged_ != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("version ", staged_->version.version,
                                                      " is staged: commit or discard it first"));
  }
  if (requested == 0) return numbers_.highest() + 1;
  if (requested > kVersionMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("version: ", requested, ", must be at most ", kVersionMax));
  }
  return requested;
}

absl::Status HeadVersions::CheckIsFree(uint64_t number) const {
  const uint64_t previous = previous_ == nullptr ? 0 : previous_->version.version;
  if (number == live_.version || number == previous) {
    return absl::AlreadyExistsError(
        absl::StrCat("version ", number, " is already ", number == previous ? "kept" : "live"));
  }
  return numbers_.CheckRises(number, live_.version);
}

absl::StatusOr<LoadTurn::Holder> HeadVersions::AwaitTurn(LoadTicker& ticker) const {
  while (true) {
    if (std::optional<LoadTurn::Holder> turn = options_.load_turn->Take(LoadTicker::kPeriod)) {
      return *std::move(turn);
    }
    LOGPROBD_RETURN_IF_ERROR(ticker.Report("checking", 0, 0));
  }
}

absl::StatusOr<EnginePlan> HeadVersions::Plan(const HeadInfo& found, bool in_place,
                                              const MemoryPlan& freed) const {
  absl::StatusOr<EnginePlan> plan = loader_.Plan(found, freed);
  if (!absl::IsResourceExhausted(plan.status())) return plan;
  return absl::ResourceExhaustedError(
      in_place ? absl::StrCat("no room for the new version: ", plan.status().message())
               : absl::StrCat("no room for a second copy: ", plan.status().message(),
                              "; in_place replaces the live weights instead, with a pause"));
}

MemoryPlan HeadVersions::MemoryToFree(bool in_place) const {
  MemoryPlan freed = in_place ? head_.memory() : MemoryPlan();
  if (const std::shared_ptr<const HeadWeights> live = head_.weights();
      in_place && live != nullptr && live->memory_bytes() > 0) {
    // The rows of a pushed version stay until the new version is live.
    AddMemory(freed, {.place = "host", .kind = "weights", .bytes = -live->memory_bytes()});
  }
  const absl::MutexLock lock(&mutex_);
  if (previous_ != nullptr) AddMemory(freed, previous_->memory());
  return freed;
}

absl::StatusOr<std::unique_ptr<VersionEngines>> HeadVersions::Make(const Planned& planned,
                                                                   LoadTicker& ticker) const {
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<VersionEngines> made,
                            loader_.Make(planned.candidate.weights, planned.plan, ticker));
  made->version = planned.candidate.version;
  made->version.loaded_unix_seconds = absl::ToUnixSeconds(absl::Now());
  return made;
}

absl::StatusOr<WeightsVersion> HeadVersions::Stage(const Planned& planned, LoadTicker& ticker) {
  LOGPROBD_RETURN_IF_ERROR(DropPrevious());  // at most two versions are in memory
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<VersionEngines> made, Make(planned, ticker));
  LOGPROBD_RETURN_IF_ERROR(ticker.Report("committing", 0, 0));  // the last chance to cancel
  const WeightsVersion version = made->version;
  LogInfo("weights staged", {{"head", name()},
                             {"version", version.version},
                             {"path", version.source},
                             {"sha256", version.sha256}});
  {
    const absl::MutexLock lock(&mutex_);
    staged_ = std::move(made);
    numbers_.RecordStaged(version.version);
  }
  NotifyChange();
  return version;
}

absl::StatusOr<WeightsVersion> HeadVersions::ReplaceInPlace(Planned planned,
                                                            std::optional<LoadTurn::Holder> turn,
                                                            LoadTicker& ticker) {
  LOGPROBD_RETURN_IF_ERROR(ticker.Report("loading", 0, planned.candidate.version.weight_bytes));
  LOGPROBD_RETURN_IF_ERROR(DropPrevious());
  const MemoryPlan memory_freed = MemoryToFree(/*in_place=*/true);
  LogInfo("replacing the weights in place; requests wait",
          {{"head", name()}, {"version", planned.candidate.version.version}});

  // A batch of the old version that hangs must not hold up the loads of other heads.
  head_.BeginCommit(nullptr);
  const bool keeps_turn = head_.AwaitRetired();
  if (!keeps_turn) turn.reset();
  std::unique_ptr<VersionEngines> old = head_.EndCommit();
  {
    const absl::MutexLock lock(&mutex_);
    const WeightsVersion old_version = std::exchange(live_, WeightsVersion());
    if (old != nullptr) old->version = old_version;
  }

  // Other heads may have taken memory meanwhile. A load of another head is not waited for, because
  // requests would wait for it, too.
  const std::optional<LoadTurn::Holder> later_turn =
      keeps_turn ? std::nullopt : options_.load_turn->Take(absl::ZeroDuration());
  if (!keeps_turn) {
    absl::StatusOr<EnginePlan> plan = absl::AbortedError(
        "another head has begun to load weights, since the batches of the old version took long "
        "to end: the old version is live again; try again when that load has ended");
    if (later_turn.has_value()) {
      plan = Plan(planned.candidate.weights->info(), /*in_place=*/true, memory_freed);
    }
    if (!plan.ok()) {
      MakeLive(std::move(old), /*keeps_previous=*/false);
      return plan.status();
    }
    planned.plan = *std::move(plan);
  }

  std::optional<Freed> freed;
  if (old != nullptr) {
    freed = {.weights = old->weights, .plan = loader_.PlanOf(*old), .version = old->version};
    const bool is_released = releaser_.Release(std::move(old));
    NotifyChange();
    if (!is_released) {
      head_.Fail("the weights were lost during a replacement in place: restart the server");
      return NotReleased();
    }
  }

  absl::StatusOr<std::unique_ptr<VersionEngines>> made = Make(planned, ticker);
  if (!made.ok()) {
    Restore(freed);
    return made.status();
  }
  WeightsVersion version = (*made)->version;
  MakeLive(*std::move(made), /*keeps_previous=*/false);
  metrics_.RecordWeightsSwap(name(), Metrics::WeightsSwap::kCommitted);
  return version;
}

void HeadVersions::Restore(const std::optional<Freed>& freed) {
  if (!freed.has_value()) {
    head_.Fail("no version of the weights could be loaded");
    return;
  }
  const WeightsVersion& version = freed->version;
  LogWarning("the new weights could not be loaded; loading the old weights again",
             {{"head", name()}, {"version", version.version}});
  const LoadTicker::Progress none;
  LoadTicker ticker(none, is_stopped_);
  auto again = loader_.Make(freed->weights, freed->plan, ticker);
  if (again.ok()) {
    (*again)->version = version;
    MakeLive(*std::move(again), /*keeps_previous=*/false);
    return;
  }
  if (is_stopped_) {
    head_.Fail(std::string(ShuttingDown().message()));
    return;
  }
  LogError("the old weights could not be loaded again; the head is not ready",
           {{"head", name()},
            {"version", version.version},
            {"source", version.source},
            {"reason", again.status().message()}});
  head_.Fail("the weights were lost during a replacement in place: load a version or restart");
  NotifyChange();
}

void HeadVersions::MakeLive(std::unique_ptr<VersionEngines> next, bool keeps_previous) {
  const WeightsVersion version = next->version;
  const std::shared_ptr<const HeadInfo> info = next->info;
  std::unique_ptr<VersionEngines> old = head_.Commit(std::move(next));
  {
    const absl::MutexLock lock(&mutex_);
    if (old != nullptr && keeps_previous) {
      old->version = live_;
      std::swap(previous_, old);
    }
    live_ = version;
    numbers_.RecordLive(version);
  }
  releaser_.Release(std::move(old));  // its memory is freed before the memory is counted
  const std::string sha256 = State().live.sha256;  // the first version's may have become known
  LogInfo("weights are live", {{"head", info->name},
                               {"version", version.version},
                               {"source", version.source},
                               {"sha256", sha256.empty() ? "unknown" : sha256}});
  metrics_.SetHead(*info);
  NotifyChange();
}

absl::StatusOr<HeadWeightsState> HeadVersions::Commit(uint64_t version) {
  const Change change(*this);
  LOGPROBD_RETURN_IF_ERROR(change.status());
  std::unique_ptr<VersionEngines> next;
  {
    const absl::MutexLock lock(&mutex_);
    if (staged_ == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("no version is staged for head \"", name(), "\": load one first"));
    }
    if (version != 0 && version != staged_->version.version) {
      return absl::FailedPreconditionError(absl::StrCat("version: ", version, ", but version ",
                                                        staged_->version.version, " is staged"));
    }
    if (!staged_->IsAnyHealthy()) {
      return absl::FailedPreconditionError("the staged version's engines have failed: discard it");
    }
    next = std::move(staged_);
  }
  MakeLive(std::move(next), /*keeps_previous=*/true);
  metrics_.RecordWeightsSwap(name(), Metrics::WeightsSwap::kCommitted);
  return State();
}

absl::StatusOr<HeadWeightsState> HeadVersions::Rollback() {
  const Change change(*this);
  LOGPROBD_RETURN_IF_ERROR(change.status());
  std::unique_ptr<VersionEngines> next;
  {
    const absl::MutexLock lock(&mutex_);
    if (previous_ == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("no previous version is kept for head \"", name(),
                       "\": it is dropped by loading another version, by in_place and by discard"));
    }
    if (!previous_->IsAnyHealthy()) {
      return absl::FailedPreconditionError("the previous version's engines have failed");
    }
    next = std::move(previous_);
  }
  MakeLive(std::move(next), /*keeps_previous=*/true);
  metrics_.RecordWeightsSwap(name(), Metrics::WeightsSwap::kRolledBack);
  return State();
}

absl::StatusOr<HeadWeightsState> HeadVersions::Discard(bool staged, bool previous) {
  const Change change(*this);
  LOGPROBD_RETURN_IF_ERROR(change.status());
  if (!staged && !previous) {
    return absl::InvalidArgumentError(
        "staged or previous must be set, or there is nothing to discard");
  }
  std::unique_ptr<VersionEngines> dropped[2];
  std::shared_ptr<const PendingPush::Version> dropped_push;
  {
    const absl::MutexLock lock(&mutex_);
    if (staged) dropped_push = push_.Drop();
    dropped[0] = staged ? std::move(staged_) : nullptr;
    dropped[1] = previous ? std::move(previous_) : nullptr;
  }
  for (std::unique_ptr<VersionEngines>& version : dropped) releaser_.Release(std::move(version));
  RecordDropped(std::move(dropped_push), "it was discarded");
  NotifyChange();
  return State();
}

HeadWeightsState HeadVersions::List() {
  const absl::MutexLock one_at_a_time(&list_mutex_);
  std::shared_ptr<const HeadWeights> unread;
  {
    const absl::MutexLock lock(&mutex_);
    if (live_.sha256.empty() || (previous_ != nullptr && previous_->version.sha256.empty())) {
      unread = unread_;
    }
  }
  if (unread != nullptr) {
    const absl::StatusOr<ContentCheck> content =
        CheckContent(*unread, [this](int64_t, int64_t) { return !is_stopped_.load(); });
    if (content.ok()) {
      const absl::MutexLock lock(&mutex_);
      numbers_.SetUnknownDigest(content->sha256);  // only the first version has none
      unread_ = nullptr;
    } else {
      LogWarning("the sha256 of the first weights could not be computed",
                 {{"head", name()}, {"reason", content.status().message()}});
    }
  }
  return State();
}

MemoryPlan HeadVersions::memory() const {
  MemoryPlan plan = releaser_.memory();
  const absl::MutexLock lock(&mutex_);
  for (const VersionEngines* version : {staged_.get(), previous_.get()}) {
    if (version != nullptr) AddMemory(plan, version->memory());
  }
  if (const int64_t bytes = push_.memory_bytes(); bytes > 0) {
    AddMemory(plan, {.place = "host", .kind = "weights", .bytes = bytes});
  }
  return plan;
}

absl::Status HeadVersions::DropPrevious() {
  std::unique_ptr<VersionEngines> dropped;
  {
    const absl::MutexLock lock(&mutex_);
    dropped = std::move(previous_);
  }
  if (dropped == nullptr) return absl::OkStatus();
  const bool is_released = releaser_.Release(std::move(dropped));
  NotifyChange();
  return is_released ? absl::OkStatus() : NotReleased();
}

HeadWeightsState HeadVersions::State() const {
  const absl::MutexLock lock(&mutex_);
  HeadWeightsState state{.head = name(),
                         .live = live_,
                         .staged = {},
                         .previous = {},
                         .pushed = push_.state(),
                         .highest_version = numbers_.highest()};
  if (staged_ != nullptr) state.staged = staged_->version;
  if (previous_ != nullptr) state.previous = previous_->version;
  // Only the first version was loaded without a digest.
  for (WeightsVersion* version : {&state.live, state.previous ? &*state.previous : nullptr}) {
    if (version != nullptr && version->sha256.empty()) {
      version->sha256 = numbers_.DigestOf(version->version);
    }
  }
  return state;
}

void HeadVersions::NotifyChange() const {
  if (options_.on_change) options_.on_change();
}

}  // namespace logprobd
