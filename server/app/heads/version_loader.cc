#include "server/app/heads/version_loader.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/app/heads/plan.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/base/host.h"
#include "server/base/log.h"
#include "server/base/text.h"
#include "server/batching/version_replicas.h"
#include "server/weights/content_check.h"

namespace logprobd {
namespace {

/// Maximum host memory that loading takes per shard, in addition to the memory that the engine
/// keeps.
constexpr int64_t kLoadBytesOfShard = int64_t{64} << 20;

/// Maximum number of rows that a pushed weight has in addition to the vocabulary.
constexpr int64_t kPaddingRowsMax = int64_t{1} << 16;

/// Returns `options` with the layout of `plan`, which all versions share.
EngineOptions WithLayoutOf(const EnginePlan& plan, EngineOptions options) {
  options.device = plan.device;
  options.shards = plan.num_shards();
  options.replicas = plan.num_replicas();
  options.gpus = GpusOf(plan.layout);
  return options;
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

template <typename T>
absl::Status CheckSame(absl::string_view field, const T& found, const T& live) {
  return found == live ? absl::OkStatus()
                       : absl::InvalidArgumentError(absl::StrCat(
                             field, ": the folder's head has ", found, ", but the live one has ",
                             live, "; only a restart can change it"));
}

/// Checks what all versions of a head have in common: clients rely on it, and the engines' layout,
/// workspace and staging are those of the first version.
absl::Status CheckMayReplace(const HeadInfo& found, const HeadInfo& live) {
  LOGPROBD_RETURN_IF_ERROR(CheckSame("hidden_size", found.hidden_size, live.hidden_size));
  LOGPROBD_RETURN_IF_ERROR(CheckSame("vocab_size", found.vocab_size, live.vocab_size));
  // Another transform means another model, or a config.json that does not belong to the weights.
  LOGPROBD_RETURN_IF_ERROR(CheckSame("scale", found.scale, live.scale));
  LOGPROBD_RETURN_IF_ERROR(CheckSame("softcap", found.softcap, live.softcap));
  const auto bias_of = [](const HeadInfo& head) { return head.has_bias ? "a bias" : "no bias"; };
  LOGPROBD_RETURN_IF_ERROR(CheckSame<absl::string_view>("has_bias", bias_of(found), bias_of(live)));
  return CheckSame("dtype", DtypeName(found.dtype), DtypeName(live.dtype));
}

}  // namespace

absl::StatusOr<std::unique_ptr<VersionEngines>> VersionEngines::Create(
    HeadInfo info, std::shared_ptr<const HeadWeights> weights,
    std::vector<std::unique_ptr<ScoringEngine>> engines, const Batcher::Options& options) {
  auto version = std::make_unique<VersionEngines>();
  version->info = std::make_shared<const HeadInfo>(std::move(info));
  version->weights = std::move(weights);
  version->engines = std::move(engines);
  std::vector<ScoringEngine*> engine_pointers;
  for (const std::unique_ptr<ScoringEngine>& engine : version->engines) {
    engine_pointers.push_back(engine.get());
  }
  LOGPROBD_ASSIGN_OR_RETURN(version->replicas, VersionReplicas::Create(options, engine_pointers));
  return version;
}

MemoryPlan VersionEngines::memory() const {
  MemoryPlan plan;
  for (const std::unique_ptr<ScoringEngine>& engine : engines) AddMemory(plan, engine->memory());
  AddMemory(plan, {.place = "host", .kind = "staging", .bytes = replicas->staging_bytes()});
  if (const int64_t bytes = weights->memory_bytes(); bytes > 0) {
    AddMemory(plan, {.place = "host", .kind = "weights", .bytes = bytes});
  }
  return plan;
}

VersionLoader::VersionLoader(Options options, Parts parts, Metrics& metrics)
    : options_(std::move(options)),
      engine_options_(WithLayoutOf(options_.plan, options_.engine)),
      parts_(std::move(parts)),
      metrics_(metrics) {}

absl::StatusOr<VersionLoader::Candidate> VersionLoader::Open(const WeightsLoad& load,
                                                             uint64_t number,
                                                             const HeadInfo& live) const {
  LOGPROBD_RETURN_IF_ERROR(CheckLoadingIsOn());
  LOGPROBD_RETURN_IF_ERROR(CheckSha256Form(load.sha256));
  ModelFolderOptions model = options_.model;
  model.weights_version = number;
  LOGPROBD_ASSIGN_OR_RETURN(ModelFolderHead found, parts_.open_model(load.path, model));
  for (const std::string& warning : found.warnings) {
    LogWarning(warning, {{"head", name()}, {"path", load.path}});
  }
  Candidate candidate;
  candidate.weights = std::move(found.weights);
  const HeadInfo& info = candidate.weights->info();
  LOGPROBD_RETURN_IF_ERROR(CheckMayReplace(info, live));
  if (info.tied != live.tied) {
    // The head of a tied model that was exported alone replaces the embedding, so this is no error.
    LogWarning("the new head is another tensor than the live one", {{"head", name()},
                                                                    {"path", load.path},
                                                                    {"tensor", info.tensor},
                                                                    {"live_tensor", live.tensor}});
  }
  candidate.version = {.version = number,
                       .sha256 = "",
                       .source = load.path,
                       .loaded_unix_seconds = 0,
                       .weight_bytes = info.weight_bytes,
                       .dtype = info.dtype};
  return candidate;
}

absl::Status VersionLoader::CheckLoadingIsOn() const {
  return options_.model.roots != nullptr
             ? absl::OkStatus()
             : absl::PermissionDeniedError(
                   "loading of weights is off: start the server with --weights-root DIR");
}

absl::StatusOr<HeadInfo> VersionLoader::PushedHead(const WeightsPush& push,
                                                   const HeadInfo& live) const {
  LOGPROBD_RETURN_IF_ERROR(CheckLoadingIsOn());
  LOGPROBD_RETURN_IF_ERROR(CheckSha256Form(push.sha256));
  if (push.dtype != live.dtype) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype: ", DtypeName(push.dtype), ", must be ", DtypeName(live.dtype),
                     ", the dtype of the live weights: convert the rows, or restart the server "
                     "with weights of the other dtype"));
  }
  HeadInfo info = live;
  info.weights_version = push.version;
  info.vocab_rows = push.vocab_rows == 0 ? live.vocab_rows : push.vocab_rows;
  if (info.vocab_rows < live.vocab_size || info.vocab_rows - live.vocab_size > kPaddingRowsMax) {
    return absl::InvalidArgumentError(absl::StrCat("vocab_rows: ", info.vocab_rows,
                                                   ", must be in [", live.vocab_size, ", ",
                                                   live.vocab_size + kPaddingRowsMax, "]"));
  }
  info.weight_bytes = info.vocab_rows * info.hidden_size * DtypeBytes(info.dtype);
  return info;
}

absl::StatusOr<std::shared_ptr<PushedWeights>> VersionLoader::OpenPush(const HeadInfo& info) const {
  const absl::StatusOr<int64_t> available = parts_.available_host_bytes();
  if (available.ok() && info.weight_bytes > *available) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the rows need ", HumanBytes(info.weight_bytes), " of host memory, but only ",
        HumanBytes(*available), " are available: ", HumanBytes(info.weight_bytes - *available),
        " are missing"));
  }
  return PushedWeights::Create(info);
}

absl::StatusOr<EnginePlan> VersionLoader::Plan(const HeadInfo& found,
                                               const MemoryPlan& freed) const {
  EngineOptions options = engine_options_;
  for (const MemoryUse& use : freed) options.reserved.push_back({use.place, use.kind, -use.bytes});
  absl::StatusOr<EnginePlan> plan = parts_.plan_engine(found, options);
  if (absl::IsFailedPrecondition(plan.status())) {
    // The dtype and layout have worked before, so the cause is a lack of GPU memory.
    return absl::ResourceExhaustedError(plan.status().message());
  }
  LOGPROBD_RETURN_IF_ERROR(plan.status());
  LOGPROBD_RETURN_IF_ERROR(CheckHostMemory(found, *plan, freed));
  return plan;
}

absl::Status VersionLoader::CheckHostMemory(const HeadInfo& found, const EnginePlan& plan,
                                            const MemoryPlan& freed) const {
  const absl::StatusOr<int64_t> available = parts_.available_host_bytes();
  if (!available.ok()) {
    LogWarning("host memory is not checked before the weights are loaded",
               {{"head", name()}, {"reason", available.status().message()}});
    return absl::OkStatus();
  }
  int64_t staging = plan.num_replicas() * ScoringEngine::kBatchesInFlight *
                    Batcher::StagingBytes(options_.batcher.batch_rows_max, found);
  int64_t spare_staging =
      options_.batcher.staging == nullptr ? 0 : options_.batcher.staging->spare_bytes();
  int64_t freed_bytes = 0;
  for (const MemoryUse& use : freed) {
    if (use.place == "host") (use.kind == "staging" ? spare_staging : freed_bytes) += use.bytes;
  }
  // The buffers of all versions have the same size, so spare ones are reused.
  if (options_.batcher.staging != nullptr) {
    staging = std::max<int64_t>(0, staging - spare_staging);
  } else {
    freed_bytes += spare_staging;
  }
  const int64_t needed = TotalBytes(plan.memory, "host") + staging +
                         plan.num_replicas() * plan.num_shards() * kLoadBytesOfShard;
  const int64_t usable = *available + freed_bytes;
  if (needed <= usable) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "it needs ", HumanBytes(needed), " of host memory, but only ", HumanBytes(usable),
      " are available: ", HumanBytes(needed - usable), " are missing"));
}

absl::Status VersionLoader::CheckContent(const WeightsLoad& load, Candidate& candidate,
                                         LoadTicker& ticker) const {
  absl::Status reported;
  absl::StatusOr<ContentCheck> content =
      logprobd::CheckContent(*candidate.weights, [&](int64_t done_bytes, int64_t total_bytes) {
        reported = ticker.Report("verifying", done_bytes, total_bytes);
        return reported.ok();
      });
  LOGPROBD_RETURN_IF_ERROR(reported);
  LOGPROBD_RETURN_IF_ERROR(content.status());
  const std::string& source = candidate.version.source;
  if (!load.sha256.empty() && absl::AsciiStrToLower(load.sha256) != content->sha256) {
    return absl::DataLossError(absl::StrCat("sha256: the head (source: ", source, ") has ",
                                            content->sha256, ", but the request expects ",
                                            load.sha256));
  }
  if (!content->nonfinite.empty() && !load.allow_nonfinite) {
    return NotFinite(source, content->nonfinite, "set allow_nonfinite to load it anyway");
  }
  candidate.version.sha256 = std::move(content->sha256);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<VersionEngines>> VersionLoader::Make(
    const std::shared_ptr<const HeadWeights>& weights, const EnginePlan& plan,
    LoadTicker& ticker) const {
  const absl::Time start = parts_.clock->Now();
  LOGPROBD_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<ScoringEngine>> engines,
                            CreateEngines(*weights, plan, ticker));
  HeadInfo info = weights->info();
  info.engine = plan.engine;
  info.engine_reason = plan.reason;
  info.layout = plan.layout;
  LOGPROBD_ASSIGN_OR_RETURN(
      std::unique_ptr<VersionEngines> made,
      VersionEngines::Create(std::move(info), weights, std::move(engines), options_.batcher));
  metrics_.RecordWeightsLoad(name(), absl::ToDoubleSeconds(parts_.clock->Now() - start));
  return made;
}

EnginePlan VersionLoader::PlanOf(const VersionEngines& made) const {
  EnginePlan plan = options_.plan;
  plan.engine = made.info->engine;
  plan.reason = made.info->engine_reason;
  return plan;
}

absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> VersionLoader::CreateEngines(
    const HeadWeights& weights, const EnginePlan& plan, LoadTicker& ticker) const {
  std::atomic<bool> is_cancelled = false;
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
                              const StoppableWeights stoppable(weights, is_cancelled);
                              engines = parts_.create_engines(stoppable, plan, options);
                              is_made.Notify();
                            }));
  absl::Status reported;
  do {
    if (reported.ok()) {
      reported = ticker.Report("loading", bytes_done, bytes_total);
      is_cancelled = !reported.ok();
    }
  } while (!is_made.WaitForNotificationWithTimeout(LoadTicker::kPeriod));
  thread.join();
  LOGPROBD_RETURN_IF_ERROR(reported);
  return engines;
}

}  // namespace logprobd
