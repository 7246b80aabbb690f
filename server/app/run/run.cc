#include "server/app/run/run.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/app/options/options_parser.h"
#include "server/app/run/notify.h"
#include "server/app/run/process.h"
#include "server/app/run/server.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/base/text.h"
#include "server/transport/grpc_versions.h"

namespace logprobd {
namespace {

int Fail(const absl::Status& status, int exit_status) {
  // A path or a name from a file may contain anything; the message must stay one line.
  WriteToLog(absl::StrCat("logprobd: error: ", OneLine(status.message(), kLogLineBytesMax), "\n"));
  return exit_status;
}

/// Reports an error of the start and returns the exit status. With kExitBadSettings the service
/// manager does not start the server again.
int FailToStart(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
      return Fail(status, kExitBadSettings);
    default:  // A restart may help: what is missing, busy, expired or full may not stay so.
      return Fail(status, kExitFailed);
  }
}

/// Ends the process without destructors.
[[noreturn]] void ExitNow(int exit_status) {
  FlushLog();
  _exit(exit_status);
}

void Print(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stdout); }

/// Passes signals to a server that may not exist yet.
class SignalRelay {
 public:
  void OnReload() {
    const absl::MutexLock lock(&mutex_);
    is_reload_due_ = server_ == nullptr;
    if (server_ != nullptr) server_->RequestReload();
  }

  void OnStop(int signal, int count) {
    LogInfo("signal", {{"name", signal == SIGINT ? "SIGINT" : "SIGTERM"}, {"count", count}});
    if (count > 1) {
      LogWarning("second signal: the process ends without finishing the work in flight");
      ExitNow(kExitWorkCut);
    }
    const absl::MutexLock lock(&mutex_);
    is_stopped_ = true;
    if (server_ != nullptr) server_->RequestStop();
  }

  /// Returns false if a signal to stop has already arrived.
  bool SetServer(Server* server) {
    const absl::MutexLock lock(&mutex_);
    server_ = server;
    if (server_ != nullptr && is_reload_due_) server_->RequestReload();
    return !is_stopped_;
  }

 private:
  absl::Mutex mutex_;
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_reload_due_ ABSL_GUARDED_BY(mutex_) = false;
  Server* server_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

int DryRun(const ServerOptions& options) {
  const absl::StatusOr<PlannedHeads> planned = PlanHeads(options, ServerParts());
  if (!planned.ok()) return FailToStart(planned.status());
  Print(PlanText(planned->plan));
  return kExitStopped;
}

int LoadAndRun(Server& server) {
  const absl::Status loaded = server.Load();
  if (absl::IsCancelled(loaded)) {
    LogInfo("stopped while loading");
    return kExitStopped;
  }
  if (!loaded.ok()) return FailToStart(loaded);
  switch (server.Run()) {
    case Server::End::kStopped:
      if (server.MayHang()) ExitNow(kExitStopped);
      return kExitStopped;
    case Server::End::kWorkCut:
      ExitNow(kExitWorkCut);
    case Server::End::kEngineFailed:
      ExitNow(kExitFailed);
  }
  return kExitFailed;
}

/// Runs the server until it stops and returns the exit status. `read_options` reads the settings
/// again.
int Serve(const ServerOptions& options,
          std::function<absl::StatusOr<ServerOptions>()> read_options) {
  std::signal(SIGPIPE, SIG_IGN);
  if (const absl::Status limits = PrepareProcessLimits(); !limits.ok()) {
    return Fail(limits, kExitFailed);
  }
  SignalRelay relay;
  const StopSignals signals([&relay](int signal, int count) { relay.OnStop(signal, count); },
                            [&relay] { relay.OnReload(); });
  LogInfo("starting",
          {{"version", Build().version}, {"commit", Build().commit}, {"grpc", GrpcVersion()}});
  ServerParts parts;
  parts.read_options = std::move(read_options);
  parts.notify = NotifyServiceManager;
  parts.notify_interval = ServiceWatchdogTime() / 2;
  parts.exit_hung_after = ExitHungAfter;
  parts.progress_on_terminal = isatty(STDERR_FILENO) != 0 && options.log_format == LogFormat::kText;
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Create(options, parts);
  if (!server.ok()) return FailToStart(server.status());
  const int exit_status = relay.SetServer(server->get()) ? LoadAndRun(**server) : kExitStopped;
  relay.SetServer(nullptr);
  return exit_status;
}

}  // namespace

int RunLogprobd(absl::Span<const std::string> arguments,
                absl::Span<const std::string> environment) {
  OpenClosedStandardStreams();
  const LogThread log_thread;  // takes no signals
  const absl::StatusOr<ParsedOptions> parsed = ParseOptions(arguments, environment);
  if (!parsed.ok()) return Fail(parsed.status(), kExitBadSettings);
  const ServerOptions& options = parsed->options;
  if (parsed->help) {
    Print(HelpText());
    return kExitStopped;
  }
  if (options.version) {
    Print(absl::StrCat("logprobd ", Build().version, " (", Build().commit, ", gRPC ", GrpcVersion(),
                       ")\n"));
    return kExitStopped;
  }
  if (options.print_config) {
    Print(ConfigText(*parsed));
    return kExitStopped;
  }
  if (const absl::Status checked = CheckServerOptions(options); !checked.ok()) {
    return Fail(checked, kExitBadSettings);
  }
  ConfigureLog({.level = options.log_level, .format = options.log_format});
  if (options.dry_run) return DryRun(options);
  return Serve(options, [&]() -> absl::StatusOr<ServerOptions> {
    LOGPROBD_ASSIGN_OR_RETURN(ParsedOptions again, ParseOptions(arguments, environment));
    return std::move(again.options);
  });
}

}  // namespace logprobd
