#include "server/app/head_versions.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/app/plan.h"
#include "server/app/stoppable_weights.h"
#include "server/base/check.h"
#include "server/base/errors.h"
#include "server/base/human_bytes.h"
#include "server/base/log.h"
#include "server/base/start_thread.h"
#include "server/weights/content_check.h"

namespace logprobd {
namespace {

/// How often a caller is told of the progress, and how soon a load notices that it is to stop.
constexpr absl::Duration kProgressPeriod = absl::Milliseconds(200);
constexpr absl::Duration kLookPeriod = absl::Milliseconds(20);
/// Loading takes less than this of host memory for a shard beyond what an engine then has.
constexpr int64_t kLoadBytesOfShard = int64_t{64} << 20;

constexpr absl::string_view kInPlaceHint =
    "in_place replaces the live weights where they lie, with a pause";

absl::Status ShuttingDown() { return absl::UnavailableError("the server is shutting down"); }

/// Engines of other versions lie where those of `plan` do.
EngineOptions WithLayoutOf(const EnginePlan& plan, EngineOptions options) {
  options.device = plan.device;
  options.shards = plan.num_shards();
  options.replicas = plan.num_replicas();
  options.gpus = GpusOf(plan.layout);
  return options;
}

/// The facts of a head once its engines are planned.
HeadInfo CompleteInfo(HeadInfo found, const EnginePlan& plan, const RequestLimits& limits) {
  found.engine = plan.engine;
  found.engine_reason = plan.reason;
  found.layout = plan.layout;
  found.limits = limits;
  return found;
}

absl::Status CheckSha256Form(const std::string& sha256) {
  constexpr size_t kHexDigits = 64;
  if (sha256.empty() || (sha256.size() == kHexDigits &&
                         std::all_of(sha256.begin(), sha256.end(), absl::ascii_isxdigit))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("sha256: must be empty or ", kHexDigits, " hexadecimal digits"));
}

}  // namespace

/// Tells a load's caller how far it is and hears whether to go on; on the caller's thread.
class HeadVersions::Ticker {
 public:
  Ticker(const Progress& progress, const std::atomic<bool>& is_stopped)
      : progress_(progress), is_stopped_(is_stopped) {}

  /// Not OK: the load is to end with it.
  absl::Status Tell(absl::string_view phase, int64_t bytes_done, int64_t bytes_total) {
    if (is_stopped_) {
      return ShuttingDown();
    }
    // Of each phase the begin and the end, and between them now and then.
    const absl::Time now = absl::Now();
    if (phase == phase_ && now < next_ && bytes_done < bytes_total) {
      return absl::OkStatus();
    }
    phase_ = std::string(phase);
    next_ = now + kProgressPeriod;
    if (progress_ && !progress_({phase_, bytes_done, bytes_total})) {
      return absl::CancelledError("the load was cancelled");
    }
    return absl::OkStatus();
  }

 private:
  const Progress& progress_;
  const std::atomic<bool>& is_stopped_;
  std::string phase_;
  absl::Time next_ = absl::InfinitePast();
};

/// A folder's head that may become a version.
struct HeadVersions::Candidate {
  std::shared_ptr<const HeadWeights> weights;
  WeightsVersion facts;
  std::optional<EnginePlan> plan;  ///< None: what must go first takes the room.
};

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

HeadVersions::HeadVersions(LocalHead& head, Options options, Parts parts, Metrics& metrics)
    : head_(head),
      options_(std::move(options)),
      engine_options_(WithLayoutOf(options_.plan, options_.engine)),
      parts_(std::move(parts)),
      metrics_(metrics),
      unread_(head.weights()),
      live_plan_(options_.plan) {
  const std::shared_ptr<const HeadInfo> info = head.info();
  live_ = {.version = info->weights_version,
           .sha256 = "",
           .source = options_.source,
           .loaded_unix_seconds = absl::ToUnixSeconds(absl::Now()),
           .weight_bytes = info->weight_bytes};
  unread_version_ = info->weights_version;
}

HeadVersions::~HeadVersions() = default;

absl::StatusOr<WeightsVersion> HeadVersions::Load(const WeightsLoad& load,
                                                  const Progress& progress) {
  const Change change(*this);
  LOGPROBD_RETURN_IF_ERROR(change.status());
  Ticker ticker(progress, is_stopped_);
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

absl::StatusOr<WeightsVersion> HeadVersions::LoadAlone(const WeightsLoad& load, Ticker& ticker) {
  LOGPROBD_ASSIGN_OR_RETURN(Candidate candidate, Check(load, ticker));
  if (load.in_place) {
    return ReplaceInPlace(std::move(candidate), ticker);
  }
  LOGPROBD_ASSIGN_OR_RETURN(WeightsVersion facts, Stage(std::move(candidate), ticker));
  if (!load.commit) {
    return facts;
  }
  std::unique_ptr<HeadVersion> next;
  {
    const absl::MutexLock lock(&mutex_);
    next = std::move(staged_);
  }
  MakeLive(std::move(next), /*keeps_previous=*/true);
  metrics_.RecordWeightsSwap(name(), Metrics::WeightsSwap::kCommitted);
  return facts;
}

/// All that can be known of a folder without changing anything.
absl::StatusOr<HeadVersions::Candidate> HeadVersions::Check(const WeightsLoad& load,
                                                            Ticker& ticker) {
  LOGPROBD_RETURN_IF_ERROR(ticker.Tell("checking", 0, 0));
  if (options_.model.roots == nullptr) {
    return absl::PermissionDeniedError(
        "loading weights is switched off: start the server with --weights-root DIR");
  }
  LOGPROBD_RETURN_IF_ERROR(CheckSha256Form(load.sha256));
  ModelFolderOptions model = options_.model;
  LOGPROBD_ASSIGN_OR_RETURN(model.weights_version, NumberOf(load));
  LOGPROBD_ASSIGN_OR_RETURN(ModelFolderHead found, parts_.open_model(load.path, model));
  for (const std::string& warning : found.warnings) {
    LogWarning(warning, {{"head", name()}, {"path", load.path}});
  }
  Candidate candidate;
  candidate.weights = std::move(found.weights);
  const HeadInfo& info = candidate.weights->info();
  LOGPROBD_RETURN_IF_ERROR(CheckShape(info));
  LOGPROBD_RETURN_IF_ERROR(Plan(candidate, load.in_place));
  absl::Status told;
  const absl::StatusOr<ContentCheck> content =
      CheckContent(*candidate.weights, [&](int64_t done_bytes, int64_t total_bytes) {
        told = ticker.Tell("verifying", done_bytes, total_bytes);
        return told.ok();
      });
  LOGPROBD_RETURN_IF_ERROR(told);
  LOGPROBD_RETURN_IF_ERROR(content.status());
  if (!load.sha256.empty() && absl::AsciiStrToLower(load.sha256) != content->sha256) {
    return absl::DataLossError(absl::StrCat("sha256: the head in ", load.path, " has ",
                                            content->sha256, ", asked for was ", load.sha256));
  }
  if (!content->nonfinite.empty() && !load.allow_nonfinite) {
    return absl::InvalidArgumentError(absl::StrCat("the head in ", load.path,
                                                   " is not finite: ", content->nonfinite,
                                                   "; allow_nonfinite loads it all the same"));
  }
  candidate.facts = {.version = info.weights_version,
                     .sha256 = content->sha256,
                     .source = load.path,
                     .loaded_unix_seconds = 0,
                     .weight_bytes = info.weight_bytes};
  return candidate;
}

absl::StatusOr<uint64_t> HeadVersions::NumberOf(const WeightsLoad& load) const {
  const absl::MutexLock lock(&mutex_);
  if (staged_ != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("version ", staged_->facts.version, " is staged: commit or discard it first"));
  }
  const uint64_t previous = previous_ == nullptr ? 0 : previous_->facts.version;
  if (load.version == 0) {
    return std::max({live_.version, previous, unread_version_}) + 1;
  }
  if (load.version == live_.version || load.version == previous) {
    return absl::AlreadyExistsError(absl::StrCat(
        "version ", load.version, " is ", load.version == previous ? "kept" : "live", " already"));
  }
  return load.version;
}

absl::Status HeadVersions::CheckShape(const HeadInfo& found) const {
  const std::shared_ptr<const HeadInfo> live = head_.info();
  if (found.hidden_size != live->hidden_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("hidden_size: the folder's head has ", found.hidden_size, ", the live one ",
                     live->hidden_size, "; only a restart changes the shape"));
  }
  if (found.vocab_size != live->vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("vocab_size: the folder's head has ", found.vocab_size, ", the live one ",
                     live->vocab_size, "; only a restart changes the shape"));
  }
  return absl::OkStatus();
}

absl::Status HeadVersions::Plan(Candidate& candidate, bool in_place) const {
  const HeadInfo& info = candidate.weights->info();
  absl::StatusOr<EnginePlan> plan = parts_.plan_engine(info, engine_options_);
  if (plan.ok()) {
    candidate.plan = *std::move(plan);
    return CheckHostMemory(info, *candidate.plan, in_place);
  }
  if (!absl::IsFailedPrecondition(plan.status()) || info.dtype != head_.info()->dtype) {
    return plan.status();
  }
  // With this dtype and layout it has worked before: what is missing is memory of GPUs.
  const absl::MutexLock lock(&mutex_);
  return in_place || previous_ != nullptr
             ? absl::OkStatus()  // looked at again when these are gone
             : absl::ResourceExhaustedError(absl::StrCat(
                   "no room for a second copy: ", plan.status().message(), "; ", kInPlaceHint));
}

absl::Status HeadVersions::CheckHostMemory(const HeadInfo& found, const EnginePlan& plan,
                                           bool in_place) const {
  const absl::StatusOr<int64_t> available = parts_.available_host_bytes();
  if (!available.ok()) {
    LogWarning("memory is not checked before weights are loaded",
               {{"head", name()}, {"reason", available.status().message()}});
    return absl::OkStatus();
  }
  const int64_t needed = TotalBytes(plan.memory, "host") +
                         plan.num_replicas() * ScoringEngine::kBatchesInFlight *
                             Batcher::StagingBytes(options_.batcher.batch_rows_max, found) +
                         plan.num_replicas() * plan.num_shards() * kLoadBytesOfShard;
  int64_t freed = in_place ? TotalBytes(head_.memory(), "host") : 0;
  {
    const absl::MutexLock lock(&mutex_);
    freed += previous_ == nullptr ? 0 : TotalBytes(previous_->memory(), "host");
  }
  if (needed <= *available + freed) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(in_place ? "the new version" : "a second copy", " needs ", HumanBytes(needed),
                   " of host memory, ", HumanBytes(*available + freed),
                   " can be had: ", HumanBytes(needed - *available - freed), " are missing",
                   in_place ? "" : absl::StrCat("; ", kInPlaceHint)));
}

absl::StatusOr<WeightsVersion> HeadVersions::Stage(Candidate candidate, Ticker& ticker) {
  DropPrevious();  // never three in memory
  if (!candidate.plan.has_value()) {
    LOGPROBD_RETURN_IF_ERROR(Plan(candidate, /*in_place=*/false));
  }
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<HeadVersion> made,
                            Make(candidate.weights, *candidate.plan, ticker));
  candidate.facts.loaded_unix_seconds = absl::ToUnixSeconds(absl::Now());
  made->facts = candidate.facts;
  LOGPROBD_RETURN_IF_ERROR(ticker.Tell("committing", 0, 0));  // the last chance to give it up
  LogInfo("weights staged", {{"head", name()},
                             {"version", candidate.facts.version},
                             {"path", candidate.facts.source},
                             {"sha256", candidate.facts.sha256}});
  {
    const absl::MutexLock lock(&mutex_);
    staged_ = std::move(made);
  }
  NotifyChange();
  return candidate.facts;
}

absl::StatusOr<std::unique_ptr<HeadVersion>> HeadVersions::Make(
    const std::shared_ptr<const HeadWeights>& weights, const EnginePlan& plan, Ticker& ticker) {
  const absl::Time start = parts_.clock->Now();
  LOGPROBD_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<ScoringEngine>> engines,
                            CreateEngines(*weights, plan, ticker));
  HeadInfo info = CompleteInfo(weights->info(), plan, head_.info()->limits);
  LOGPROBD_ASSIGN_OR_RETURN(
      std::unique_ptr<HeadVersion> made,
      HeadVersion::Create(std::move(info), weights, std::move(engines), options_.batcher));
  metrics_.RecordWeightsLoad(name(), absl::ToDoubleSeconds(parts_.clock->Now() - start));
  return made;
}

/// On a thread of its own, so that the caller's hears meanwhile whether to go on.
absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> HeadVersions::CreateEngines(
    const HeadWeights& weights, const EnginePlan& plan, Ticker& ticker) {
  std::atomic<bool> is_given_up = false;
  std::atomic<int64_t> bytes_done = 0;
  std::atomic<int64_t> bytes_total = weights.info().weight_bytes;
  EngineOptions options = engine_options_;
  options.progress = [&](int64_t done, int64_t total) {
    bytes_done = done;
    bytes_total = total;
  };
  absl::Notification is_made;
  absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> engines;
  LOGPROBD_ASSIGN_OR_RETURN(std::thread thread, StartThread("weights-load", [&] {
                              const StoppableWeights stoppable(weights, is_given_up);
                              engines = parts_.create_engines(stoppable, plan, options);
                              is_made.Notify();
                            }));
  absl::Status told;
  do {
    if (told.ok()) {
      told = ticker.Tell("loading", bytes_done, bytes_total);
      is_given_up = !told.ok();
    }
  } while (!is_made.WaitForNotificationWithTimeout(kLookPeriod));
  thread.join();
  LOGPROBD_RETURN_IF_ERROR(told);
  return engines;
}

absl::StatusOr<WeightsVersion> HeadVersions::ReplaceInPlace(Candidate candidate, Ticker& ticker) {
  LOGPROBD_RETURN_IF_ERROR(ticker.Tell("loading", 0, candidate.facts.weight_bytes));
  DropPrevious();
  LogInfo("replacing weights in place: requests wait",
          {{"head", name()}, {"version", candidate.facts.version}});
  std::unique_ptr<HeadVersion> old = head_.Commit(nullptr);
  WeightsVersion old_facts;
  {
    const absl::MutexLock lock(&mutex_);
    old_facts = std::exchange(live_, WeightsVersion());
  }
  if (old != nullptr) {
    old->generation.reset();
    old->engines.clear();
  }
  absl::Status status;
  std::unique_ptr<HeadVersion> made;
  if (!candidate.plan.has_value()) {
    status = Plan(candidate, /*in_place=*/false);
  }
  if (status.ok()) {
    auto next = Make(candidate.weights, *candidate.plan, ticker);
    status = next.status();
    made = next.ok() ? *std::move(next) : nullptr;
  }
  if (!status.ok()) {
    if (old != nullptr) {
      Restore(*old, old_facts);
    } else {
      head_.Fail("no version of the weights could be loaded");
    }
    return status;
  }
  candidate.facts.loaded_unix_seconds = absl::ToUnixSeconds(absl::Now());
  made->facts = candidate.facts;
  MakeLive(std::move(made), /*keeps_previous=*/false);
  metrics_.RecordWeightsSwap(name(), Metrics::WeightsSwap::kCommitted);
  return candidate.facts;
}

/// Loads the version that had to go once more, from the files that are still open.
void HeadVersions::Restore(const HeadVersion& old, const WeightsVersion& facts) {
  LogWarning("the new weights could not be loaded: loading those before again",
             {{"head", name()}, {"version", facts.version}});
  EnginePlan plan;
  {
    const absl::MutexLock lock(&mutex_);
    plan = live_plan_;
  }
  const Progress none;
  Ticker ticker(none, is_stopped_);
  auto again = Make(old.weights, plan, ticker);
  if (!again.ok()) {
    LogError("the weights before could not be loaded again either: the head is not ready",
             {{"head", name()},
              {"version", facts.version},
              {"source", facts.source},
              {"reason", again.status().message()}});
    head_.Fail("the weights were lost when they were replaced in place: load a version or restart");
    NotifyChange();
    return;
  }
  (*again)->facts = facts;
  MakeLive(*std::move(again), /*keeps_previous=*/false);
}

void HeadVersions::MakeLive(std::unique_ptr<HeadVersion> next, bool keeps_previous) {
  const WeightsVersion facts = next->facts;
  const std::shared_ptr<const HeadInfo> info = next->info;
  std::unique_ptr<HeadVersion> old = head_.Commit(std::move(next));
  std::unique_ptr<HeadVersion> dropped;
  {
    const absl::MutexLock lock(&mutex_);
    dropped = std::move(previous_);
    if (old != nullptr && keeps_previous) {
      old->facts = live_;
      previous_ = std::move(old);
    }
    live_ = facts;
    live_plan_.engine = info->engine;
    live_plan_.reason = info->engine_reason;
  }
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
  std::unique_ptr<HeadVersion> next;
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
  std::unique_ptr<HeadVersion> next;
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
  std::unique_ptr<HeadVersion> dropped[2];
  {
    const absl::MutexLock lock(&mutex_);
    dropped[0] = staged ? std::move(staged_) : nullptr;
    dropped[1] = previous ? std::move(previous_) : nullptr;
  }
  for (std::unique_ptr<HeadVersion>& version : dropped) {
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
    unread = unread_;
  }
  if (unread != nullptr) {
    const absl::StatusOr<ContentCheck> content =
        CheckContent(*unread, [this](int64_t, int64_t) { return !is_stopped_.load(); });
    if (!content.ok()) {
      LogWarning("the sha256 of the live weights is not known",
                 {{"head", name()}, {"reason", content.status().message()}});
    }
    const absl::MutexLock lock(&mutex_);
    unread_ = nullptr;
    const std::string sha256 = content.ok() ? content->sha256 : "";
    if (live_.version == unread_version_) {
      live_.sha256 = sha256;
    } else if (previous_ != nullptr && previous_->facts.version == unread_version_) {
      previous_->facts.sha256 = sha256;
    }
  }
  return State();
}

MemoryPlan HeadVersions::memory() const {
  MemoryPlan plan;
  const absl::MutexLock lock(&mutex_);
  for (const HeadVersion* version : {staged_.get(), previous_.get()}) {
    if (version != nullptr) {
      for (const MemoryUse& use : version->memory()) {
        AddMemory(plan, use);
      }
    }
  }
  return plan;
}

void HeadVersions::DropPrevious() {
  std::unique_ptr<HeadVersion> dropped;
  {
    const absl::MutexLock lock(&mutex_);
    dropped = std::move(previous_);
  }
  if (dropped != nullptr) {
    dropped.reset();
    NotifyChange();
  }
}

HeadWeightsState HeadVersions::StateLocked() const {
  HeadWeightsState state{.head = name(), .live = live_, .staged = {}, .previous = {}};
  if (staged_ != nullptr) {
    state.staged = staged_->facts;
  }
  if (previous_ != nullptr) {
    state.previous = previous_->facts;
  }
  return state;
}

HeadWeightsState HeadVersions::State() const {
  const absl::MutexLock lock(&mutex_);
  return StateLocked();
}

void HeadVersions::NotifyChange() const {
  if (options_.on_change) {
    options_.on_change();
  }
}

}  // namespace logprobd
