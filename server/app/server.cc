#include "server/app/server.h"

#include <atomic>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "server/app/build_facts.h"
#include "server/app/load_progress.h"
#include "server/app/local_head.h"
#include "server/app/local_head_registry.h"
#include "server/app/stoppable_weights.h"
#include "server/base/errors.h"
#include "server/base/human_bytes.h"
#include "server/base/listen_address.h"
#include "server/base/log.h"
#include "server/http/http_server.h"
#include "server/metrics/metrics.h"
#include "server/transport/grpc_server.h"

namespace logprobd {
namespace {

/// How often Run looks whether the engines still live.
constexpr absl::Duration kHealthInterval = absl::Milliseconds(100);

GrpcServer::Options GrpcOptionsOf(const ServerOptions& options) {
  GrpcServer::Options result;
  result.listen = options.listen;
  result.local = options.local;
  result.admin = options.admin;
  result.insecure = options.insecure;
  result.reflection = options.reflection;
  result.message_bytes_max = options.max_message_bytes;
  result.receive_bytes_max = options.receive_bytes;
  result.streams_max = static_cast<int32_t>(options.streams_max);
  result.answer_bytes_max = options.queue_bytes;  // whatever the queue admits can be answered
  result.answer_client_share = options.client_share;
  result.version = Build().version;
  return result;
}

/// "host:0" with the port that was taken.
std::string WithPort(const std::string& address, int port) {
  return absl::StrCat(address.substr(0, address.rfind(':') + 1), port);
}

std::string MemoryText(const MemoryPlan& plan) {
  return absl::StrJoin(plan, ", ", [](std::string* out, const MemoryUse& use) {
    absl::StrAppend(out, use.place, " ", use.kind, " ", HumanBytes(use.bytes));
  });
}

/// "gpu2, gpu3"; empty where the layout is not known.
std::string DevicesOf(const std::vector<ShardPlace>& layout, int replica) {
  std::vector<std::string> devices;
  for (const ShardPlace& place : layout) {
    if (place.replica == replica) {
      devices.push_back(place.device);
    }
  }
  return absl::StrJoin(devices, ", ");
}

absl::Status CheckHttpAddress(const ServerOptions& options) {
  LOGPROBD_ASSIGN_OR_RETURN(const ListenAddress address,
                            ParseListenAddress("--http", options.http));
  return CheckPublic("--http", address, options.insecure);
}

}  // namespace

absl::StatusOr<PlannedHead> PlanHead(const ServerOptions& options, const ServerParts& parts) {
  LOGPROBD_ASSIGN_OR_RETURN(ModelFolderHead found,
                            parts.open_model(options.model, ModelOptionsOf(options)));
  const absl::StatusOr<EnginePlan> engine =
      parts.plan_engine(found.weights->info(), EngineOptionsOf(options));
  LOGPROBD_RETURN_IF_ERROR(WithContext(engine.status(), absl::StrCat("--device ", options.device)));
  PlannedHead head;
  head.plan = MakeServingPlan(options, found.weights->info(), *engine, found.warnings);
  head.weights = std::move(found.weights);
  return head;
}

struct Server::Impl {
  enum class State { kLoading, kReady, kStopping };

  Impl(const ServerOptions& server_options, const ServerParts& server_parts,
       PlannedHead planned_head)
      : options(server_options),
        parts(server_parts),
        clock(*server_parts.clock),
        planned(std::move(planned_head)),
        metrics({.heads = {server_options.head_name},
                 .version = Build().version,
                 .commit = Build().commit,
                 .gpus = GpusOf(planned.plan.engine.layout)}),
        progress(server_parts.progress_on_terminal, clock),
        plan_text(PlanText(planned.plan)) {}

  absl::Status Listen();
  std::string NotReadyReason();
  std::string StatusText();
  void SetMemory(MemoryPlan memory);
  void LogReady(absl::Duration load_time);
  std::string FailureText() const;
  void WatchReplicas();
  bool AwaitStop(absl::Time until);
  bool Drain();

  void SetState(State new_state) {
    const absl::MutexLock lock(&mutex);
    state = new_state;
  }

  const ServerOptions options;
  const ServerParts parts;
  const Clock& clock;
  PlannedHead planned;
  Metrics metrics;
  LoadProgress progress;
  std::atomic<bool> stop_loading = false;
  std::vector<bool> is_loss_logged;  // of Run: [num_replicas]

  absl::Mutex mutex;
  bool stop_requested ABSL_GUARDED_BY(mutex) = false;
  State state ABSL_GUARDED_BY(mutex) = State::kLoading;
  std::string plan_text ABSL_GUARDED_BY(mutex);

  // Destroyed from the last: no call may be running when the heads go.
  LocalHeadRegistry registry;
  std::unique_ptr<HttpServer> http;
  std::shared_ptr<LocalHead> head;
  std::unique_ptr<GrpcServer> grpc;
};

absl::Status Server::Impl::Listen() {
  metrics.SetMemory(planned.plan.memory);
  metrics.SetInflightBytesLimit(options.queue_bytes);
  if (!options.http.empty()) {
    LOGPROBD_RETURN_IF_ERROR(CheckHttpAddress(options));
    HttpServer::Options http_options;
    http_options.listen = options.http;
    http_options.not_ready_reason = [this] { return NotReadyReason(); };
    http_options.status_text = [this] { return StatusText(); };
    LOGPROBD_ASSIGN_OR_RETURN(http, HttpServer::Create(http_options, metrics));
  }
  LOGPROBD_ASSIGN_OR_RETURN(grpc,
                            GrpcServer::Create(GrpcOptionsOf(options), registry, metrics, clock));
  return absl::OkStatus();
}

std::string Server::Impl::NotReadyReason() {
  const absl::MutexLock lock(&mutex);
  switch (state) {
    case State::kLoading:
      return absl::StrCat("loading the weights ", progress.Text());
    case State::kReady:
      return head->healthy() ? "" : FailureText();
    case State::kStopping:
      break;
  }
  return "shutting down";
}

std::string Server::Impl::StatusText() {
  std::string state_text = NotReadyReason();
  if (state_text.empty()) {
    const std::string failure = FailureText();
    state_text = failure.empty() ? "ready" : absl::StrCat("ready, but ", failure);
  }
  const absl::MutexLock lock(&mutex);
  return absl::StrCat("logprobd ", Build().version, "\n\nstate        ", state_text, "\n",
                      plan_text, "\nSee /metrics, /healthz and /readyz.\n");
}

/// What of the loaded head has failed; empty: nothing.
std::string Server::Impl::FailureText() const {
  const int num_replicas = head->num_replicas();
  const int num_lost = num_replicas - head->num_healthy();
  if (num_lost == 0) {
    return "";
  }
  return num_replicas == 1 ? "the engine has failed"
                           : absl::StrCat(num_lost, " of ", num_replicas, " replicas ",
                                          num_lost == 1 ? "has" : "have", " failed");
}

/// Tells of the replicas that have failed since the last call.
void Server::Impl::WatchReplicas() {
  const int num_replicas = head->num_replicas();
  const int num_healthy = head->num_healthy();
  metrics.SetReplicas(options.head_name, num_healthy, num_replicas - num_healthy);
  if (num_replicas == 1) {
    return;  // its loss ends Run, which says so
  }
  is_loss_logged.resize(static_cast<size_t>(num_replicas));
  for (int replica = 0; replica < num_replicas; ++replica) {
    const auto index = static_cast<size_t>(replica);
    if (is_loss_logged[index] || head->is_replica_healthy(replica)) {
      continue;
    }
    is_loss_logged[index] = true;
    LogError("a replica has failed", {{"head", options.head_name},
                                      {"replica", replica},
                                      {"devices", DevicesOf(planned.plan.engine.layout, replica)},
                                      {"replicas_left", num_healthy}});
  }
}

/// Puts what was really reserved in place of the plan's figures.
void Server::Impl::SetMemory(MemoryPlan memory) {
  memory.push_back({"host", "receive", options.receive_bytes});
  metrics.SetMemory(memory);
  planned.plan.memory = std::move(memory);
  const absl::MutexLock lock(&mutex);
  plan_text = PlanText(planned.plan);
}

void Server::Impl::LogReady(absl::Duration load_time) {
  LogAlways(
      "ready",
      {{"head", planned.plan.head.name},
       {"engine", planned.plan.head.engine},
       {"grpc", WithPort(options.listen, grpc->port())},
       {"http", http == nullptr ? "none" : WithPort(options.http, http->port())},
       {"local", options.local.empty() ? "none" : options.local},
       {"admin", options.admin.empty() ? "none" : WithPort(options.admin, grpc->admin_port())},
       {"memory", MemoryText(planned.plan.memory)},
       {"load_seconds", absl::ToDoubleSeconds(load_time)}});
}

bool Server::Impl::AwaitStop(absl::Time until) {
  const absl::MutexLock lock(&mutex);
  return clock.AwaitUntil(mutex, absl::Condition(&stop_requested), until);
}

bool Server::Impl::Drain() {
  const absl::Time deadline = clock.Now() + absl::Seconds(options.grace_s);
  SetState(State::kStopping);
  metrics.SetReady(options.head_name, false);
  grpc->Shutdown(absl::Seconds(options.grace_s));
  const bool in_time = clock.Now() < deadline;
  return head->Drain(deadline) && in_time;
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() {
  impl_->grpc.reset();
  impl_->registry.Clear();
}

absl::StatusOr<std::unique_ptr<Server>> Server::Create(const ServerOptions& options,
                                                       const ServerParts& parts) {
  LOGPROBD_ASSIGN_OR_RETURN(PlannedHead planned, PlanHead(options, parts));
  std::unique_ptr<Server> server(
      new Server(std::make_unique<Impl>(options, parts, std::move(planned))));
  LOGPROBD_RETURN_IF_ERROR(server->impl_->Listen());
  return server;
}

absl::Status Server::Load() {
  Impl& impl = *impl_;
  const ServingPlan& plan = impl.planned.plan;
  for (const std::string& warning : plan.warnings) {
    LogWarning(warning, {{"head", plan.head.name}});
  }
  LogInfo("loading", {{"head", plan.head.name},
                      {"model", DescribeHead(plan.head)},
                      {"engine", plan.head.engine},
                      {"reason", plan.head.engine_reason}});
  const absl::Time start = impl.clock.Now();
  const StoppableWeights weights(*impl.planned.weights, impl.stop_loading);
  EngineOptions engine_options = EngineOptionsOf(impl.options);
  engine_options.metrics = &impl.metrics;
  engine_options.batch_time_max = BatchTimeMaxOf(impl.options, plan.engine.device);
  engine_options.progress = [&impl](int64_t done_bytes, int64_t total_bytes) {
    impl.progress.Update(done_bytes, total_bytes);
  };
  absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>> engines =
      impl.parts.create_engines(weights, plan.engine, engine_options);
  impl.progress.Finish();
  LOGPROBD_RETURN_IF_ERROR(engines.status());

  LOGPROBD_ASSIGN_OR_RETURN(
      impl.head, LocalHead::Create(plan.head, std::move(impl.planned.weights), *std::move(engines),
                                   BatcherOptionsOf(impl.options), impl.clock, impl.metrics));
  impl.SetMemory(impl.head->memory());
  const absl::Duration load_time = impl.clock.Now() - start;
  impl.metrics.RecordWeightsLoad(plan.head.name, absl::ToDoubleSeconds(load_time));
  if (impl.stop_loading) {
    return absl::CancelledError("stopped while loading the weights");
  }
  impl.registry.Publish(impl.head);
  impl.metrics.SetHead(plan.head);
  impl.SetState(Impl::State::kReady);
  impl.metrics.SetReady(plan.head.name, true);
  impl.WatchReplicas();
  impl.grpc->SetServing(true);
  impl.LogReady(load_time);
  return absl::OkStatus();
}

Server::End Server::Run() {
  Impl& impl = *impl_;
  bool stop = false;
  impl.WatchReplicas();
  while (!stop && impl.head->healthy()) {
    stop = impl.AwaitStop(impl.clock.Now() + kHealthInterval);
    impl.WatchReplicas();
  }
  if (!stop) {
    LogError(absl::StrCat(impl.FailureText(), ": stopping"), {{"head", impl.options.head_name}});
  } else {
    LogInfo("stopping", {{"grace_seconds", impl.options.grace_s}});
  }
  const bool finished = impl.Drain();
  if (!stop) {
    return End::kEngineFailed;
  }
  if (!finished) {
    LogWarning("stopped before all work was finished", {{"grace_seconds", impl.options.grace_s}});
    return End::kWorkCut;
  }
  LogInfo("stopped");
  return End::kStopped;
}

void Server::RequestStop() {
  impl_->stop_loading = true;
  const absl::MutexLock lock(&impl_->mutex);
  impl_->stop_requested = true;
}

bool Server::HasLostReplica() const {
  return impl_->head != nullptr && impl_->head->num_healthy() < impl_->head->num_replicas();
}

int Server::grpc_port() const { return impl_->grpc->port(); }

int Server::http_port() const { return impl_->http == nullptr ? 0 : impl_->http->port(); }

const ServingPlan& Server::plan() const { return impl_->planned.plan; }

}  // namespace logprobd
