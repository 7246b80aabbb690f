#include "server/app/heads/head_manager.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/app/options/part_options.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/weights/content_check.h"

namespace logprobd {
namespace {

/// Value of Batcher::Options::busy_poll. It exceeds the time from a response until the next request
/// of the same client, about 300 us, so that such a request need not wake the batch thread.
constexpr absl::Duration kBusyPollRequest = absl::Microseconds(500);

constexpr char kNonfiniteAdvice[] =
    "every row would score NaN: repair the checkpoint, or leave rows without a token out with "
    "--valid-vocab";

/// Returns the devices of a replica as "gpu2, gpu3", or an empty string if the layout is not known.
std::string DevicesOf(const std::vector<ShardPlace>& layout, int replica) {
  std::vector<std::string> devices;
  for (const ShardPlace& place : layout) {
    if (place.replica == replica) devices.push_back(place.device);
  }
  return absl::StrJoin(devices, ", ");
}

}  // namespace

HeadManager::HeadManager(ServerOptions options, ServingPlan plan,
                         std::unique_ptr<HeadWeights> weights,
                         std::shared_ptr<const AllowedRoots> roots, Turns turns,
                         const ServerParts& parts, Metrics& metrics)
    : options_(std::move(options)),
      turns_(turns),
      parts_(parts),
      metrics_(metrics),
      weights_(std::move(weights)),
      roots_(std::move(roots)),
      plan_(std::move(plan)),
      queue_rows_max_(options_.queue_rows) {}

absl::Status HeadManager::Load(const std::atomic<bool>& stop,
                               const std::function<void(int64_t, int64_t)>& progress,
                               std::function<void()> on_change) {
  const ServingPlan plan = this->plan();
  for (const std::string& warning : plan.warnings) LogWarning(warning, {{"head", name()}});
  LogInfo("loading", {{"head", name()},
                      {"model", DescribeHead(plan.head)},
                      {"engine", plan.head.engine},
                      {"reason", plan.head.engine_reason}});
  const absl::Time start = parts_.clock->Now();
  // The engines read every valid row, so the check needs no pass of its own.
  const FiniteWeights finite(*weights_, options_.model, kNonfiniteAdvice);
  const StoppableWeights weights(finite, stop);
  EngineOptions engine_options = EngineOptionsOf(options_);
  engine_options.metrics = &metrics_;
  engine_options.batch_time_max = BatchTimeMaxOf(options_, plan.engine.device);
  engine_options.heartbeats = parts_.heartbeats.get();
  engine_options.progress = progress;
  LOGPROBD_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<ScoringEngine>> engines,
                            parts_.create_engines(weights, plan.engine, engine_options));
  LOGPROBD_RETURN_IF_ERROR(ReserveStaging(engines));
  LOGPROBD_ASSIGN_OR_RETURN(
      std::shared_ptr<InProcessHead> head,
      InProcessHead::Create(plan.head, std::move(weights_), std::move(engines),
                            BatcherOptions(options_), *parts_.clock, metrics_));
  const absl::Duration load_time = parts_.clock->Now() - start;
  metrics_.RecordWeightsLoad(name(), absl::ToDoubleSeconds(load_time));
  if (stop) return absl::CancelledError("stopped while loading the weights");
  metrics_.SetHead(plan.head);
  engine_options.progress = nullptr;
  std::shared_ptr<HeadVersions> versions =
      MakeVersions(*head, engine_options, std::move(on_change));
  const absl::MutexLock lock(&mutex_);
  plan_.memory = MemoryOf(*head, *versions);
  head_ = std::move(head);
  versions_ = std::move(versions);
  return absl::OkStatus();
}

absl::Status HeadManager::ReserveStaging(
    const std::vector<std::unique_ptr<ScoringEngine>>& engines) {
  const int64_t bytes = Batcher::StagingBytes(options_.batch_rows, plan().head);
  for (size_t i = 0; i < engines.size(); ++i) {
    LOGPROBD_RETURN_IF_ERROR(
        staging_.Reserve(static_cast<int>(i), *engines[i], bytes, NumStagingBuffers(options_)));
  }
  return absl::OkStatus();
}

std::shared_ptr<HeadVersions> HeadManager::MakeVersions(InProcessHead& head,
                                                        const EngineOptions& engine_options,
                                                        std::function<void()> on_change) {
  VersionLoader::Options load;
  load.model = ModelOptionsOf(options_);
  load.model.roots = roots_;
  load.engine = engine_options;
  load.batcher = BatcherOptions(options_);
  load.plan = plan().engine;
  const auto available_bytes = [this]() -> absl::StatusOr<int64_t> {
    const HostMemorySize host = parts_.host_memory();
    if (host.available_bytes == 0) {
      return absl::UnavailableError("the system does not say how much host memory is free");
    }
    return host.available_bytes;
  };
  VersionLoader loader(std::move(load),
                       {.open_model = parts_.open_model,
                        .plan_engine = parts_.plan_engine,
                        .create_engines = parts_.create_engines,
                        .available_host_bytes = available_bytes,
                        .clock = parts_.clock},
                       metrics_);
  HeadVersions::Options options;
  options.source = options_.model;
  options.load_turn = turns_.load;
  options.push_idle_max = absl::Seconds(options_.push_idle_s);
  options.clock = parts_.clock;
  options.on_change = [this, on_change = std::move(on_change)] {
    UpdatePlan();
    on_change();
  };
  return std::make_shared<HeadVersions>(head, std::move(loader), std::move(options), metrics_);
}

MemoryPlan HeadManager::MemoryOf(const InProcessHead& head, const HeadVersions& versions) const {
  MemoryPlan memory = head.memory();
  AddMemory(memory, versions.memory());
  AddMemory(memory, {.place = "host", .kind = "staging", .bytes = staging_.spare_bytes()});
  return memory;
}

void HeadManager::UpdatePlan() {
  const std::shared_ptr<InProcessHead> head = this->head();
  MemoryPlan memory = MemoryOf(*head, *versions());
  const absl::MutexLock lock(&mutex_);
  const std::shared_ptr<const HeadInfo> info = head->info();  // includes the limits of SetLimits
  plan_.head = *info;
  plan_.engine.engine = info->engine;
  plan_.engine.reason = info->engine_reason;
  plan_.memory = std::move(memory);
}

Batcher::Options HeadManager::BatcherOptions(const ServerOptions& options) {
  Batcher::Options result = BatcherOptionsOf(options);
  result.turns = turns_.devices;
  result.turns_head = turns_.head;
  result.staging = &staging_;
  result.heartbeats = parts_.heartbeats.get();
  if (plan().engine.device == Device::kCuda) {  // a CPU engine needs all cores itself
    result.busy_poll = kBusyPollRequest;
  }
  return result;
}

std::shared_ptr<InProcessHead> HeadManager::head() const {
  const absl::MutexLock lock(&mutex_);
  return head_;
}

std::shared_ptr<HeadVersions> HeadManager::versions() const {
  const absl::MutexLock lock(&mutex_);
  return versions_;
}

ServingPlan HeadManager::plan() const {
  const absl::MutexLock lock(&mutex_);
  return plan_;
}

bool HeadManager::is_ready() const {
  const std::shared_ptr<InProcessHead> head = this->head();
  return head != nullptr && head->healthy() && head->failure().empty();
}

bool HeadManager::may_hang() const {
  const std::shared_ptr<InProcessHead> head = this->head();
  const std::shared_ptr<HeadVersions> versions = this->versions();
  return (head != nullptr && head->num_healthy() < head->num_replicas()) ||
         (versions != nullptr && versions->is_releasing());
}

std::string HeadManager::FailureText() const {
  const std::shared_ptr<InProcessHead> head = this->head();
  const int num_replicas = head == nullptr ? 0 : head->num_replicas();
  const int num_lost = head == nullptr ? 0 : num_replicas - head->num_healthy();
  if (num_lost == 0) return head == nullptr ? "" : head->failure();
  return num_replicas == 1 ? "the engine has failed"
                           : absl::StrCat(num_lost, " of ", num_replicas, " replicas ",
                                          num_lost == 1 ? "has" : "have", " failed");
}

HeadStatus HeadManager::Status() const {
  const std::shared_ptr<InProcessHead> head = this->head();
  const std::string failure = FailureText();
  HeadStatus status;
  status.info = plan().head;
  {
    const absl::MutexLock lock(&mutex_);
    status.queue_rows_max = queue_rows_max_;
  }
  if (head == nullptr) {
    status.state_text = "loading";
    return status;
  }
  for (int replica = 0; replica < head->num_replicas(); ++replica) {
    status.is_replica_healthy.push_back(head->is_replica_healthy(replica));
  }
  status.state = !head->ready()    ? ServingState::kNotReady
                 : failure.empty() ? ServingState::kReady
                                   : ServingState::kDegraded;
  status.state_text = !failure.empty() ? failure : head->ready() ? "ready" : "shutting down";
  return status;
}

bool HeadManager::Watch(bool is_only) {
  const std::shared_ptr<InProcessHead> head = this->head();
  versions()->DropIdlePush();
  const int num_replicas = head->num_replicas();
  const int num_healthy = head->num_healthy();
  metrics_.SetReplicas(name(), num_healthy, num_replicas - num_healthy);
  is_loss_logged_.resize(static_cast<size_t>(num_replicas));
  for (int replica = 0; replica < num_replicas && num_replicas > 1; ++replica) {
    const auto index = static_cast<size_t>(replica);
    const bool has_failed = !head->is_replica_healthy(replica);
    const bool is_new = has_failed && !is_loss_logged_[index];
    is_loss_logged_[index] = has_failed;  // cleared when engines of another version are healthy
    if (!is_new) continue;
    LogError("a replica has failed", {{"head", name()},
                                      {"replica", replica},
                                      {"devices", DevicesOf(plan().engine.layout, replica)},
                                      {"replicas_left", num_healthy}});
  }
  if (const bool ready = is_ready(); std::exchange(was_ready_, ready) != ready) {
    metrics_.SetReady(name(), ready);
  }
  if (num_healthy == 0 && !is_end_logged_ && !is_only) {
    is_end_logged_ = true;
    LogError(absl::StrCat(FailureText(), ": this head is not served until a restart"),
             {{"head", name()}});
  }
  return num_healthy > 0;
}

absl::Status HeadManager::SetLimits(const ServerOptions& options) {
  const RequestLimits limits = LimitsOf(options);
  LOGPROBD_RETURN_IF_ERROR(head()->SetLimits(BatcherOptions(options), limits));
  const absl::MutexLock lock(&mutex_);
  plan_.head.limits = limits;
  queue_rows_max_ = options.queue_rows;
  return absl::OkStatus();
}

bool HeadManager::Drain(absl::Time deadline) {
  const std::shared_ptr<InProcessHead> head = this->head();
  return head == nullptr || head->Drain(deadline);
}

void HeadManager::Abandon(const absl::Status& why) {
  if (const std::shared_ptr<InProcessHead> head = this->head(); head != nullptr) head->Abandon(why);
}

}  // namespace logprobd
