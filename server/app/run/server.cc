#include "server/app/run/server.h"

#include <atomic>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "server/app/heads/head_manager.h"
#include "server/app/heads/head_table.h"
#include "server/app/heads/load_control.h"
#include "server/app/options/part_options.h"
#include "server/app/options/token_file.h"
#include "server/app/run/http_access.h"
#include "server/app/run/process.h"
#include "server/app/run/same_host.h"
#include "server/app/run/status.h"
#include "server/app/run/watchdog.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/base/text.h"
#include "server/batching/device_turns.h"
#include "server/http/http_server.h"
#include "server/metrics/metrics.h"
#include "server/transport/grpc_server.h"
#include "server/transport/grpc_versions.h"
#include "server/transport/tls_files.h"

namespace logprobd {
namespace {

/// Longest state that the service manager gets.
constexpr size_t kStateBytesMax = 1'024;
/// Interval at which Run checks whether the engines are healthy.
constexpr absl::Duration kHealthInterval = absl::Milliseconds(100);
/// Longest time that the process may take to end after the grace time, which is mostly the time to
/// free memory.
constexpr absl::Duration kExitTimeMax = absl::Seconds(30);
/// Longest time for the last answers of a process that hangs, and the part of it in which the calls
/// are given their answers. The rest is for the log and for locks that somebody holds.
constexpr absl::Duration kHungTimeMax = absl::Seconds(2);
constexpr absl::Duration kHungAnswerTime = absl::Seconds(1);

absl::StatusOr<GrpcServer::Options> GrpcOptionsOf(const ServerOptions& options,
                                                  const SameHostMemory& same_host,
                                                  std::shared_ptr<const AccessList> access,
                                                  const TlsFiles* tls) {
  GrpcServer::Options result;
  result.listen = options.listen;
  SetSameHostOptions(options, same_host, result);
  LOGPROBD_ASSIGN_OR_RETURN(result.admin, AdminAddress(options));
  result.tls = tls;
  result.insecure = options.insecure;
  result.audit_required = options.audit_required;
  result.access = std::move(access);
  result.reflection = options.reflection;
  result.message_bytes_max = options.max_message_bytes;
  result.receive_bytes_max = options.receive_bytes;
  result.streams_max = static_cast<int32_t>(options.streams_max);
  // Within this limit, every request that the queue admits can be answered.
  result.answers = {.bytes_max = options.queue_bytes, .client_share_max = options.client_share};
  result.version = Build().version;
  return result;
}

/// Returns `address` with the port that the listener has bound.
std::string WithPort(const std::string& address, int port) {
  return absl::StrCat(address.substr(0, address.rfind(':') + 1), port);
}

std::string MemoryText(const MemoryPlan& plan) {
  return absl::StrJoin(plan, ", ", [](std::string* out, const MemoryUse& use) {
    absl::StrAppend(out, use.place, " ", use.kind, " ", HumanBytes(use.bytes));
  });
}

std::vector<std::string> NamesOf(const ServerPlan& plan) {
  std::vector<std::string> names;
  for (const ServingPlan& head : plan.heads) names.push_back(head.head.name);
  return names;
}

std::vector<HeadInfo> InfosOf(const ServerPlan& plan) {
  std::vector<HeadInfo> infos;
  for (const ServingPlan& head : plan.heads) infos.push_back(head.head);
  return infos;
}

}  // namespace

struct Server::Impl {
  using Phase = ServerHealth::Phase;

  Impl(const ServerOptions& server_options, const ServerParts& server_parts, PlannedHeads planned);

  absl::Status Listen();
  absl::Status ListenToHttp();
  ServerPlan Plan();
  ServerHealth Health();
  std::string StatusText();
  ServerStatus Status();
  absl::Status LoadHead(HeadManager& head);
  void Publish(const HeadManager& head);
  void UpdateServing();
  void LogReady(absl::Duration load_time);
  void Notify(absl::string_view lines = "");
  absl::Status SendToServiceManager(const std::string& message);
  void NotifyStopping();
  bool WatchHeads();
  bool AwaitStop(absl::Time until);
  bool TakeReload();
  void Reload();
  void Apply(const ServerOptions& reloaded);
  bool Drain();
  absl::Status StartWatchdog();
  void EndHung(absl::Span<const HungThread> still);
  void PublishMemory();

  bool IsOnly() const { return heads.size() == 1; }

  const ServerOptions start_options;
  ServerOptions options;  // Options in force; used by the thread that calls Create, Load and Run.
  const ServerParts parts;
  const Clock& clock;
  Metrics metrics;
  StatusBoard status_board;
  LoadProgress progress;
  std::atomic<bool> stop_loading = false;
  bool is_serving = false;  // State that health reports; used by Load and Run.

  absl::Mutex mutex;
  bool stop_requested ABSL_GUARDED_BY(mutex) = false;
  bool reload_requested ABSL_GUARDED_BY(mutex) = false;
  Phase phase ABSL_GUARDED_BY(mutex) = Phase::kLoading;
  std::string hang ABSL_GUARDED_BY(mutex);  // Set when the process is about to end.
  ServerPlan plan ABSL_GUARDED_BY(mutex);   // The initial plan; Plan() returns the current one.
  absl::Mutex memory_mutex;                 // Used by PublishMemory; locked before `mutex`.
  absl::Mutex notify_mutex;                 // Locked before `mutex`.
  std::string notified ABSL_GUARDED_BY(notify_mutex);  // The state as the service manager knows it.
  std::string unsent ABSL_GUARDED_BY(notify_mutex);    // Its lines that have not been sent yet.
  std::atomic<bool> is_manager_reached = true;

  // The members below are destroyed in reverse order: no call may be running when the heads are
  // destroyed, and requests of the heads may hold memory of clients.
  SameHostMemory same_host;
  std::shared_ptr<AccessList> access;       // Null if callers need no tokens.
  std::unique_ptr<TlsFiles> tls;            // Null without TLS.
  std::unique_ptr<HttpAccess> http_access;  // Null if callers need no tokens.
  std::unique_ptr<DeviceTurns> turns;       // Null if no heads share devices.
  bool serves_while_loading = true;
  LoadTurn load_turn;
  HeadTable head_table;
  std::vector<std::unique_ptr<HeadManager>> heads;
  std::unique_ptr<HttpServer> http;
  std::unique_ptr<GrpcServer> grpc;
  const std::shared_ptr<Heartbeat> main_heartbeat;
  std::unique_ptr<Watchdog> watchdog;
};

Server::Impl::Impl(const ServerOptions& server_options, const ServerParts& server_parts,
                   PlannedHeads planned)
    : start_options(server_options),
      options(server_options),
      parts(server_parts),
      clock(*server_parts.clock),
      metrics({.heads = NamesOf(planned.plan),
               .version = Build().version,
               .commit = Build().commit,
               .grpc = GrpcVersion(),
               .gpus = GpusOf(planned.plan),
               .gpu_pci_bus_ids = PciBusIdsOf(planned.plan)}),
      status_board(metrics, clock),
      progress(server_parts.progress_on_terminal, clock),
      plan(planned.plan),
      head_table(InfosOf(planned.plan)),
      main_heartbeat(parts.heartbeats->Add({.thread = "main", .head = ""})) {
  if (const std::vector<DeviceTurns::Head> in_turn = TurnHeadsOf(plan); !in_turn.empty()) {
    serves_while_loading = !AnyWaitsForPeers(in_turn);
    turns = std::make_unique<DeviceTurns>(in_turn);
  }
  for (size_t i = 0; i < planned.options.size(); ++i) {
    heads.push_back(std::make_unique<HeadManager>(
        std::move(planned.options[i]), std::move(planned.plan.heads[i]),
        std::move(planned.weights[i]), std::move(planned.roots[i]),
        HeadManager::Turns{turns.get(), static_cast<int>(i), &load_turn}, parts, metrics));
  }
}

absl::Status Server::Impl::Listen() {
  PublishMemory();
  metrics.SetInflightBytesLimit(options.queue_bytes);
  if (!options.tokens.empty()) {
    absl::StatusOr<std::vector<AccessEntry>> entries = AccessEntriesOf(options);
    // Whatever is wrong with the file is a wrong setting, as with a configuration file.
    if (!entries.ok()) return absl::InvalidArgumentError(entries.status().message());
    access = std::make_shared<AccessList>(*std::move(entries));
    http_access = std::make_unique<HttpAccess>(access, metrics);
  }
  if (const TlsFiles::Options files = TlsOptionsOf(options); files.is_enabled()) {
    LOGPROBD_ASSIGN_OR_RETURN(tls, TlsFiles::Create(files, metrics, clock));
  }
  if (!options.http.empty()) {
    LOGPROBD_RETURN_IF_ERROR(ListenToHttp());
  }
  LOGPROBD_ASSIGN_OR_RETURN(same_host, CreateSameHostMemory(options, Plan(), metrics));
  LOGPROBD_ASSIGN_OR_RETURN(const GrpcServer::Options grpc_options,
                            GrpcOptionsOf(options, same_host, access, tls.get()));
  LOGPROBD_ASSIGN_OR_RETURN(
      grpc, GrpcServer::Create(grpc_options, head_table, metrics, clock, &head_table));
  for (const std::string& flag : InsecureListeners(options)) metrics.SetInsecureListener(flag);
  for (const std::string& warning : ListenerWarnings(options, GrpcVersion())) LogWarning(warning);
  return StartWatchdog();
}

absl::Status Server::Impl::ListenToHttp() {
  HttpServer::Options result;
  result.listen = options.http;
  result.insecure = options.insecure;
  if (tls != nullptr) {
    result.certificate = {.cert_pem = tls->pair().cert, .key_pem = tls->pair().key};
  }
  if (http_access != nullptr) {
    result.check_access = [this](absl::string_view path, absl::string_view authorization,
                                 absl::string_view peer) {
      return http_access->Check(path, authorization, peer);
    };
  }
  result.not_ready_reason = [this] { return NotReadyReason(Health()); };
  result.ready_text = [this] { return ReadyText(Health()); };
  result.status_text = [this] { return StatusText(); };
  result.status_page = [this] { return status_board.Page(Status()); };
  LOGPROBD_ASSIGN_OR_RETURN(http, HttpServer::Create(std::move(result), metrics));
  if (tls != nullptr) {
    tls->SetTaker([this](const TlsFiles::Pair& pair) {
      return http->SetCertificate({.cert_pem = pair.cert, .key_pem = pair.key});
    });
  }
  return absl::OkStatus();
}

absl::Status Server::Impl::StartWatchdog() {
  Watchdog::Options watch;
  watch.still_max = HangTimeMaxOf(options);
  watch.on_hang = [this](absl::Span<const HungThread> still) { EndHung(still); };
  watch.ping_interval = parts.notify_interval;
  watch.ping = [this] { SendToServiceManager("WATCHDOG=1").IgnoreError(); };
  LOGPROBD_ASSIGN_OR_RETURN(watchdog, Watchdog::Create(std::move(watch), *parts.heartbeats, clock));
  return absl::OkStatus();
}

/// Answers all calls and ends the process, on the watchdog's thread. Whatever blocks here, because
/// a thread that hangs holds it, is cut short by the timer; the clients then get UNAVAILABLE from
/// their closed connections.
void Server::Impl::EndHung(absl::Span<const HungThread> still) {
  parts.exit_hung_after(kHungTimeMax);
  const std::string text = DescribeHang(still.front());
  {
    const absl::MutexLock lock(&mutex);
    hang = text;
  }
  for (const HungThread& each : still) {
    LogError(absl::StrCat("the process ends: ", DescribeHang(each)));
  }
  grpc->SetServing(false);
  for (const std::unique_ptr<HeadManager>& head : heads) {
    head->Abandon(absl::UnavailableError(absl::StrCat("the server hangs and restarts: ", text)));
  }
  grpc->Shutdown(kHungAnswerTime);
  parts.exit_hung_after(absl::ZeroDuration());
}

/// Returns the plan with the memory that loaded heads use and the limits in force.
ServerPlan Server::Impl::Plan() {
  const absl::MutexLock lock(&mutex);
  ServerPlan now = plan;
  for (size_t i = 0; i < heads.size(); ++i) now.heads[i] = heads[i]->plan();
  return now;
}

/// Publishes the memory in use. May be called from any thread; the lock ensures that the newest
/// values are published last.
void Server::Impl::PublishMemory() {
  const absl::MutexLock lock(&memory_mutex);
  metrics.SetMemory(Plan().memory());
}

ServerHealth Server::Impl::Health() {
  ServerHealth health;
  {
    const absl::MutexLock lock(&mutex);
    health.phase = phase;
    health.hang = hang;
  }
  if (!health.hang.empty()) {
    return health;  // The thread that hangs may hold locks of its head.
  }
  health.progress = progress.Text();
  for (const std::unique_ptr<HeadManager>& head : heads) {
    health.heads.push_back({.name = head->name(),
                            .is_loaded = head->head() != nullptr,
                            .is_ready = head->is_ready(),
                            .failure = head->FailureText()});
  }
  return health;
}

std::string Server::Impl::StatusText() {
  return absl::StrCat("logprobd ", Build().version, "\n\nstate        ", StateOf(Health()).second,
                      "\n", PlanText(Plan()));
}

ServerStatus Server::Impl::Status() {
  const ServerPlan now = Plan();
  ServerStatus status;
  status.version = Build().version;
  status.commit = Build().commit;
  std::tie(status.state, status.state_text) = StateOf(Health());
  status.memory = now.memory();
  // This runs on a thread of the HTTP server, and no reload changes the listeners.
  status.warnings = ListenerWarnings(start_options, GrpcVersion());
  for (size_t i = 0; i < heads.size(); ++i) {
    status.heads.push_back(heads[i]->Status());
    status.warnings.insert(status.warnings.end(), now.heads[i].warnings.begin(),
                           now.heads[i].warnings.end());
  }
  return status;
}

/// Logs what has failed since the last call. Returns whether a head with a healthy replica is left.
bool Server::Impl::WatchHeads() {
  bool any_left = false;
  for (const std::unique_ptr<HeadManager>& head : heads) {
    const bool is_left = head->Watch(IsOnly());
    any_left = any_left || is_left;
  }
  return any_left;
}

void Server::Impl::LogReady(absl::Duration load_time) {
  const ServerPlan now = Plan();
  std::vector<std::string> engines;
  for (const ServingPlan& head : now.heads) {
    if (!absl::c_linear_search(engines, head.head.engine)) engines.push_back(head.head.engine);
  }
  LogAlways("ready",
            {{"head", absl::StrJoin(NamesOf(now), ", ")},
             {"engine", absl::StrJoin(engines, ", ")},
             {"grpc", WithPort(options.listen, grpc->port())},
             {"http", http == nullptr ? "none" : WithPort(options.http, http->port())},
             {"local", grpc->unix_socket_path().empty() ? "none" : grpc->unix_socket_path()},
             {"admin", options.admin.empty() ? "none" : grpc->admin_address()},
             {"memory", MemoryText(now.memory())},
             {"load_seconds", absl::ToDoubleSeconds(load_time)}});
}

/// Sends `lines`, each of which ends in a newline, and the state as text to the service manager.
/// Without lines it sends the text, if that has changed, and what the manager did not take before,
/// so that one that reads late learns that the server is ready.
void Server::Impl::Notify(absl::string_view lines) {
  const absl::MutexLock lock(&notify_mutex);
  // A failure may quote anything, and a newline would begin another variable.
  const std::string state_text = OneLine(StateOf(Health()).second, kStateBytesMax);
  // New lines replace earlier ones, since READY=1 must not arrive together with RELOADING=1.
  if (!lines.empty()) unsent = std::string(lines);
  if (unsent.empty() && state_text == notified) return;
  if (SendToServiceManager(absl::StrCat(unsent, "STATUS=", state_text)).ok()) {
    notified = state_text;
    unsent.clear();
  }
}

/// Sends a message, and logs when the service manager can no longer be reached or is reached again.
absl::Status Server::Impl::SendToServiceManager(const std::string& message) {
  absl::Status status = parts.notify(message);
  if (is_manager_reached.exchange(status.ok()) == status.ok()) return status;
  if (status.ok()) {
    LogInfo("the service manager is reached again");
  } else {
    LogWarning("cannot reach the service manager", {{"reason", status.message()}});
  }
  return status;
}

/// Announces the drain, and how long it may take, to the service manager, whose own limit may be
/// shorter than a --grace-s that the configuration sets.
void Server::Impl::NotifyStopping() {
  const absl::Duration time_max = absl::Seconds(options.grace_s) + kExitTimeMax;
  SendToServiceManager(
      absl::StrCat("STOPPING=1\nEXTEND_TIMEOUT_USEC=", absl::ToInt64Microseconds(time_max),
                   "\nSTATUS=finishing the work in flight, at most ", options.grace_s, " s"))
      .IgnoreError();
}

bool Server::Impl::AwaitStop(absl::Time until) {
  const absl::MutexLock lock(&mutex);
  const auto has_request = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return stop_requested || reload_requested;
  };
  clock.AwaitUntil(mutex, absl::Condition(&has_request), until);
  return stop_requested;
}

bool Server::Impl::TakeReload() {
  const absl::MutexLock lock(&mutex);
  return std::exchange(reload_requested, false);
}

void Server::Impl::Reload() {
  const absl::StatusOr<ServerOptions> next_options = parts.read_options();
  const absl::StatusOr<logprobd::Reload> reload =
      next_options.ok() ? PlanReload(start_options, options, *next_options) : next_options.status();
  absl::StatusOr<std::vector<AccessEntry>> entries;
  if (access != nullptr) {
    entries = AccessEntriesOf(options);
  } else {
    entries.emplace();
  }
  if (const absl::Status status = reload.ok() ? entries.status() : reload.status(); !status.ok()) {
    LogError("SIGHUP: all settings stay as they are", {{"reason", status.message()}});
    return;
  }
  if (access != nullptr) {
    const auto num_tokens = absl::c_count_if(*entries, std::mem_fn(&AccessEntry::is_token));
    LogAlways("SIGHUP: the tokens were read again",
              {{"tokens", num_tokens},
               {"certificates", static_cast<int64_t>(entries->size()) - num_tokens}});
    access->Set(*std::move(entries));
  }
  Apply(reload->options);
  LogAlways("SIGHUP",
            {{"applied", reload->applied.empty() ? "nothing has changed"
                                                 : absl::StrJoin(reload->applied, ", ")}});
  if (!reload->needs_restart.empty()) {
    LogWarning("SIGHUP: changed settings need a restart",
               {{"settings", absl::StrJoin(reload->needs_restart, ", ")}});
  }
}

void Server::Impl::Apply(const ServerOptions& reloaded) {
  options = reloaded;
  SetLogLevel(options.log_level);
  metrics.SetInflightBytesLimit(options.queue_bytes);
  grpc->SetAnswerLimits(options.queue_bytes, options.client_share);
  const std::vector<ServerOptions> of_heads = HeadOptions(options);
  for (size_t i = 0; i < heads.size(); ++i) {
    const absl::Status status = heads[i]->SetLimits(of_heads[i]);
    LOGPROBD_CHECK(status.ok(), status.message());  // CheckServerOptions has accepted the options
  }
}

bool Server::Impl::Drain() {
  const absl::Time deadline = clock.Now() + absl::Seconds(options.grace_s);
  {
    const absl::MutexLock lock(&mutex);
    phase = Phase::kStopping;
  }
  NotifyStopping();
  head_table.StopChanges();
  for (const std::unique_ptr<HeadManager>& head : heads) metrics.SetReady(head->name(), false);
  grpc->Shutdown(absl::Seconds(options.grace_s));
  bool is_finished = clock.Now() < deadline;
  for (const std::unique_ptr<HeadManager>& head : heads) {
    const bool is_drained = head->Drain(deadline);
    is_finished = is_finished && is_drained;
  }
  return is_finished;
}

absl::Status Server::Impl::LoadHead(HeadManager& head) {
  Notify();
  const absl::Status status = head.Load(
      stop_loading,
      [this](int64_t done_bytes, int64_t total) {
        progress.Update(done_bytes, total);
        Notify();
      },
      [this] { PublishMemory(); });
  progress.Finish();
  if (!status.ok()) {
    return IsOnly() ? status : WithContext(status, absl::StrCat("head \"", head.name(), "\""));
  }
  PublishMemory();
  if (serves_while_loading) Publish(head);
  return absl::OkStatus();
}

void Server::Impl::Publish(const HeadManager& head) {
  head_table.Publish(head.head(), head.versions());
  metrics.SetReady(head.name(), true);
}

/// Sets the health status to SERVING if a head can score, otherwise to NOT_SERVING.
void Server::Impl::UpdateServing() {
  const bool any_ready = absl::c_any_of(heads, [](const auto& head) { return head->is_ready(); });
  if (any_ready != is_serving) {
    is_serving = any_ready;
    grpc->SetServing(is_serving);
  }
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() {
  impl_->watchdog.reset();
  impl_->head_table.StopChanges();
  impl_->grpc.reset();
  impl_->head_table.Clear();
}

absl::StatusOr<std::unique_ptr<Server>> Server::Create(const ServerOptions& options,
                                                       const ServerParts& parts) {
  LOGPROBD_ASSIGN_OR_RETURN(PlannedHeads planned, PlanHeads(options, parts));
  std::unique_ptr<Server> server(
      new Server(std::make_unique<Impl>(options, parts, std::move(planned))));
  LOGPROBD_RETURN_IF_ERROR(server->impl_->Listen());
  return server;
}

absl::Status Server::Load() {
  Impl& impl = *impl_;
  const absl::Time start = impl.clock.Now();
  {
    // Loads of new weights for loaded heads wait for this turn, because the other heads need the
    // free memory.
    const auto turn = impl.load_turn.Take(absl::InfiniteDuration());
    for (const std::unique_ptr<HeadManager>& head : impl.heads) {
      LOGPROBD_RETURN_IF_ERROR(impl.LoadHead(*head));
    }
  }
  for (const std::unique_ptr<HeadManager>& head : impl.heads) {
    if (!impl.serves_while_loading) impl.Publish(*head);
  }
  {
    const absl::MutexLock lock(&impl.mutex);
    impl.plan.available.clear();  // The heads have allocated this memory.
    impl.phase = Impl::Phase::kServing;
  }
  impl.WatchHeads();
  impl.UpdateServing();
  impl.LogReady(impl.clock.Now() - start);
  impl.Notify("READY=1\n");
  return absl::OkStatus();
}

Server::End Server::Run() {
  Impl& impl = *impl_;
  bool stop = false;
  bool any_left = impl.WatchHeads();
  while (!stop && any_left) {
    const absl::Time next_check = impl.clock.Now() + kHealthInterval;
    impl.main_heartbeat->End();
    stop = impl.AwaitStop(next_check);
    impl.main_heartbeat->Begin();
    if (!stop && impl.TakeReload()) {
      impl.Notify(
          absl::StrCat("RELOADING=1\nMONOTONIC_USEC=", absl::ToUnixMicros(impl.clock.Now()), "\n"));
      impl.Reload();
      if (impl.tls != nullptr) impl.tls->Reload();
      impl.Notify("READY=1\n");
    }
    if (impl.tls != nullptr) impl.tls->ReloadIfChanged();
    impl.grpc->CancelUnreadAnswers();
    any_left = impl.WatchHeads();
    impl.UpdateServing();
    impl.Notify();
    impl.status_board.Sample();
  }
  impl.main_heartbeat->End();  // The drain has its own limit.
  if (!stop) {
    LogError(absl::StrCat(FailureText(impl.Health()), ": stopping"));
  } else {
    LogInfo("stopping", {{"grace_seconds", impl.options.grace_s}});
  }
  const bool finished = impl.Drain();
  if (!stop) return End::kEngineFailed;
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

void Server::RequestReload() {
  const absl::MutexLock lock(&impl_->mutex);
  impl_->reload_requested = true;
}

bool Server::MayHang() const {
  return absl::c_any_of(impl_->heads, [](const auto& head) { return head->may_hang(); });
}

int Server::grpc_port() const { return impl_->grpc->port(); }

std::string Server::admin_address() const { return impl_->grpc->admin_address(); }

int Server::http_port() const { return impl_->http == nullptr ? 0 : impl_->http->port(); }

ServerPlan Server::plan() const { return impl_->Plan(); }

}  // namespace logprobd
