#include "server/app/head_versions.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/app/plan.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/weights/content_check.h"

namespace logprobd {
namespace {

/// As of --weights-version: JSON and metrics hold such numbers exactly, and there is always a next.
constexpr uint64_t kVersionMax = 9'000'000'000'000'000;

}  // namespace

/// The right to change versions; one has it at a time.
class HeadVersions::Change {
 public:
  explicit Change(HeadVersions& versions)
      : versions_(versions), is_ours_(!versions.is_changing_.exchange(true)) {}
  ~Change() {
    if (is_ours_) {
      versions_.is_changing_ = false;
    }
  }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

  absl::Status status() const {
    if (!is_ours_) {
      return absl::AbortedError(absl::StrCat("the weights of head \"", versions_.name(),
                                             "\" are being changed by another call"));
    }
    return versions_.is_stopped_ ? ShuttingDown() : absl::OkStatus();
  }

 private:
  HeadVersions& versions_;
  const bool is_ours_;
};

HeadVersions::HeadVersions(LocalHead& head, VersionLoader loader, Options options, Metrics& metrics)
    : head_(head),
      loader_(std::move(loader)),
      options_(std::move(options)),
      metrics_(metrics),
      unread_(head.weights()) {
  const std::shared_ptr<const HeadInfo> info = head.info();
  live_ = {.version = info->weights_version,
           .sha256 = "",
           .source = options_.source,
           .loaded_unix_seconds = absl::ToUnixSeconds(absl::Now()),
           .weight_bytes = info->weight_bytes};
  highest_version_ = info->weights_version;
}

HeadVersions::~HeadVersions() = default;

absl::StatusOr<WeightsVersion> HeadVersions::Load(const WeightsLoad& load,
                                                  const LoadTicker::Progress& progress) {
  const Change change(*this);
  LOGPROBD_RETURN_IF_ERROR(change.status());
  LoadTicker ticker(progress, is_stopped_);
  absl::StatusOr<WeightsVersion> loaded = LoadAlone(load, ticker);
  if (!loaded.ok()) {
    const bool is_given_up = absl::IsCancelled(loaded.status()) || is_stopped_;
    metrics_.RecordWeightsSwap(
        name(), is_given_up ? Metrics::WeightsSwap::kCancelled : Metrics::WeightsSwap::kFailed);
    LogWarning("weights were not loaded",
               {{"head", name()},
                {"path", load.path},
                {"code", absl::StatusCodeToString(loaded.status().code())},
                {"reason", loaded.status().message()}});
  }
  return loaded;
}

absl::StatusOr<WeightsVersion> HeadVersions::LoadAlone(const WeightsLoad& load,
                                                       LoadTicker& ticker) {
  // All that can be known without changing anything comes first.
  LOGPROBD_RETURN_IF_ERROR(ticker.Tell("checking", 0, 0));
  LOGPROBD_ASSIGN_OR_RETURN(const uint64_t number, NumberOf(load));
  Planned planned;
  LOGPROBD_ASSIGN_OR_RETURN(planned.candidate, loader_.Open(load, number, *head_.info()));
  LOGPROBD_ASSIGN_OR_RETURN(const LoadTurn::Holder turn, AwaitTurn(ticker));
  LOGPROBD_ASSIGN_OR_RETURN(planned.plan, Plan(planned.candidate.weights->info(), load.in_place));
  LOGPROBD_RETURN_IF_ERROR(loader_.CheckContent(load, planned.candidate, ticker));
  if (load.in_place) {
    return ReplaceInPlace(planned, ticker);
  }
  absl::StatusOr<WeightsVersion> staged = Stage(planned, ticker);
  if (!staged.ok()) {
    NotifyChange();  // of another dtype it has left other spares of staging
  }
  if (!staged.ok() || !load.commit) {
    return staged;
  }
  std::unique_ptr<VersionEngines> next;
  {
    const absl::MutexLock lock(&mutex_);
    next = std::move(staged_);
  }
  MakeLive(std::move(next), /*keeps_previous=*/true);
  metrics_.RecordWeightsSwap(name(), Metrics::WeightsSwap::kCommitted);
  return staged;
}

absl::StatusOr<uint64_t> HeadVersions::NumberOf(const WeightsLoad& load) const {
  const absl::MutexLock lock(&mutex_);
  if (staged_ != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("version ", staged_->facts.version, " is staged: commit or discard it first"));
  }
  if (load.version == 0) {
    return highest_version_ + 1;
  }
  if (load.version > kVersionMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("version: ", load.version, ", must be at most ", kVersionMax));
  }
  const uint64_t previous = previous_ == nullptr ? 0 : previous_->facts.version;
  if (load.version == live_.version || load.version == previous) {
    return absl::AlreadyExistsError(absl::StrCat(
        "version ", load.version, " is ", load.version == previous ? "kept" : "live", " already"));
  }
  return load.version;
}

absl::StatusOr<LoadTurn::Holder> HeadVersions::AwaitTurn(LoadTicker& ticker) const {
  while (true) {
    if (std::optional<LoadTurn::Holder> turn = options_.load_turn->Take(LoadTicker::kPeriod)) {
      return *std::move(turn);
    }
    LOGPROBD_RETURN_IF_ERROR(ticker.Tell("checking", 0, 0));
  }
}

absl::StatusOr<EnginePlan> HeadVersions::Plan(const HeadInfo& found, bool in_place) const {
  absl::StatusOr<EnginePlan> plan = loader_.Plan(found, *head_.info(), MemoryThatGoes(in_place));
  if (!absl::IsResourceExhausted(plan.status())) {
    return plan;
  }
  return absl::ResourceExhaustedError(
      in_place ? absl::StrCat("no room for the new version: ", plan.status().message())
               : absl::StrCat("no room for a second copy: ", plan.status().message(),
                              "; in_place replaces the live weights where they lie, with a pause"));
}

/// What a load gives back before it takes memory.
MemoryPlan HeadVersions::MemoryThatGoes(bool in_place) const {
  MemoryPlan freed = in_place ? head_.memory() : MemoryPlan();
  const absl::MutexLock lock(&mutex_);
  if (previous_ != nullptr) {
    for (const MemoryUse& use : previous_->memory()) {
      AddMemory(freed, use);
    }
  }
  return freed;
}

absl::StatusOr<std::unique_ptr<VersionEngines>> HeadVersions::Make(const Planned& planned,
                                                                   LoadTicker& ticker) const {
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<VersionEngines> made,
                            loader_.Make(planned.candidate.weights, planned.plan, ticker));
  made->facts = planned.candidate.facts;
  made->facts.loaded_unix_seconds = absl::ToUnixSeconds(absl::Now());
  return made;
}

absl::StatusOr<WeightsVersion> HeadVersions::Stage(const Planned& planned, LoadTicker& ticker) {
  DropPrevious();  // never three in memory
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<VersionEngines> made, Make(planned, ticker));
  LOGPROBD_RETURN_IF_ERROR(ticker.Tell("committing", 0, 0));  // the last chance to give it up
  const WeightsVersion facts = made->facts;
  LogInfo("weights staged", {{"head", name()},
                             {"version", facts.version},
                             {"path", facts.source},
                             {"sha256", facts.sha256}});
  {
    const absl::MutexLock lock(&mutex_);
    staged_ = std::move(made);
    highest_version_ = std::max(highest_version_, facts.version);
  }
  NotifyChange();
  return facts;
}

absl::StatusOr<WeightsVersion> HeadVersions::ReplaceInPlace(const Planned& planned,
                                                            LoadTicker& ticker) {
  const WeightsVersion& facts = planned.candidate.facts;
  LOGPROBD_RETURN_IF_ERROR(ticker.Tell("loading", 0, facts.weight_bytes));
  DropPrevious();
  LogInfo("replacing weights in place: requests wait",
          {{"head", name()}, {"version", facts.version}});
  std::unique_ptr<VersionEngines> old = head_.Commit(nullptr);
  WeightsVersion old_facts;
  {
    const absl::MutexLock lock(&mutex_);
    old_facts = std::exchange(live_, WeightsVersion());
  }
  if (old != nullptr) {
    old->generation.reset();
    old->engines.clear();
    NotifyChange();
  }
  absl::StatusOr<std::unique_ptr<VersionEngines>> made = Make(planned, ticker);
  if (!made.ok()) {
    if (old != nullptr) {
      Restore(*old, old_facts);
    } else {
      head_.Fail("no version of the weights could be loaded");
    }
    return made.status();
  }
  WeightsVersion new_facts = (*made)->facts;
  MakeLive(*std::move(made), /*keeps_previous=*/false);
  metrics_.RecordWeightsSwap(name(), Metrics::WeightsSwap::kCommitted);
  return new_facts;
}

/// Loads the version that had to go once more, from the files that are still open.
void HeadVersions::Restore(const VersionEngines& old, const WeightsVersion& facts) {
  LogWarning("the new weights could not be loaded: loading those before again",
             {{"head", name()}, {"version", facts.version}});
  const LoadTicker::Progress none;
  LoadTicker ticker(none, is_stopped_);
  auto again = loader_.Make(old.weights, loader_.PlanOf(old), ticker);
  if (again.ok()) {
    (*again)->facts = facts;
    MakeLive(*std::move(again), /*keeps_previous=*/false);
    return;
  }
  if (is_stopped_) {
    head_.Fail(std::string(ShuttingDown().message()));
    return;
  }
  LogError("the weights before could not be loaded again either: the head is not ready",
           {{"head", name()},
            {"version", facts.version},
            {"source", facts.source},
            {"reason", again.status().message()}});
  head_.Fail("the weights were lost when they were replaced in place: load a version or restart");
  NotifyChange();
}

void HeadVersions::MakeLive(std::unique_ptr<VersionEngines> next, bool keeps_previous) {
  const WeightsVersion facts = next->facts;
  const std::shared_ptr<const HeadInfo> info = next->info;
  std::unique_ptr<VersionEngines> old = head_.Commit(std::move(next));
  {
    const absl::MutexLock lock(&mutex_);
    if (old != nullptr && keeps_previous) {
      old->facts = live_;
      std::swap(previous_, old);
    }
    live_ = facts;
    highest_version_ = std::max(highest_version_, facts.version);
  }
  old = nullptr;  // its memory is gone before it is counted
  LogInfo("weights are live", {{"head", info->name},
                               {"version", facts.version},
                               {"source", facts.source},
                               {"sha256", facts.sha256}});
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
    if (version != 0 && version != staged_->facts.version) {
      return absl::FailedPreconditionError(absl::StrCat("version: ", version, ", but version ",
                                                        staged_->facts.version, " is staged"));
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
                       "\": loading another one, in_place and discard drop it"));
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
    return absl::InvalidArgumentError("staged or previous must be set: nothing is to be dropped");
  }
  std::unique_ptr<VersionEngines> dropped[2];
  {
    const absl::MutexLock lock(&mutex_);
    dropped[0] = staged ? std::move(staged_) : nullptr;
    dropped[1] = previous ? std::move(previous_) : nullptr;
  }
  for (std::unique_ptr<VersionEngines>& version : dropped) {
    version.reset();
  }
  NotifyChange();
  return State();
}

HeadWeightsState HeadVersions::List() {
  const absl::MutexLock one_at_a_time(&list_mutex_);
  std::shared_ptr<const HeadWeights> unread;
  {
    const absl::MutexLock lock(&mutex_);
    if (live_.sha256.empty() || (previous_ != nullptr && previous_->facts.sha256.empty())) {
      unread = unread_;
    }
  }
  if (unread != nullptr) {
    const absl::StatusOr<ContentCheck> content =
        CheckContent(*unread, [this](int64_t, int64_t) { return !is_stopped_.load(); });
    if (content.ok()) {
      const absl::MutexLock lock(&mutex_);
      first_sha256_ = content->sha256;
      unread_ = nullptr;
    } else {
      LogWarning("the sha256 of the first weights is not known",
                 {{"head", name()}, {"reason", content.status().message()}});
    }
  }
  return State();
}

MemoryPlan HeadVersions::memory() const {
  MemoryPlan plan;
  const absl::MutexLock lock(&mutex_);
  for (const VersionEngines* version : {staged_.get(), previous_.get()}) {
    if (version != nullptr) {
      for (const MemoryUse& use : version->memory()) {
        AddMemory(plan, use);
      }
    }
  }
  return plan;
}

void HeadVersions::DropPrevious() {
  std::unique_ptr<VersionEngines> dropped;
  {
    const absl::MutexLock lock(&mutex_);
    dropped = std::move(previous_);
  }
  if (dropped != nullptr) {
    dropped.reset();
    NotifyChange();
  }
}

HeadWeightsState HeadVersions::State() const {
  const absl::MutexLock lock(&mutex_);
  HeadWeightsState state{.head = name(), .live = live_, .staged = {}, .previous = {}};
  if (staged_ != nullptr) {
    state.staged = staged_->facts;
  }
  if (previous_ != nullptr) {
    state.previous = previous_->facts;
  }
  // Only the first version was loaded without one.
  if (state.live.sha256.empty()) {
    state.live.sha256 = first_sha256_;
  }
  if (state.previous.has_value() && state.previous->sha256.empty()) {
    state.previous->sha256 = first_sha256_;
  }
  return state;
}

void HeadVersions::NotifyChange() const {
  if (options_.on_change) {
    options_.on_change();
  }
}

}  // namespace logprobd
