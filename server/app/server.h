#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/app/plan.h"
#include "server/app/plan_heads.h"
#include "server/app/server_options.h"

namespace logprobd {

/// The server: every part built in order, one life.
///
///   Create (listens; health says no) -> Load (reads the weights; ready) -> Run (until it is to
///   stop)
///
/// Load and Run from one thread; RequestStop and RequestReload from any, at any time.
class Server {
 public:
  enum class End {
    kStopped,       ///< As asked, all work finished.
    kWorkCut,       ///< As asked, but the grace time passed before all work was finished.
    kEngineFailed,  ///< Every replica of every head failed; what could be answered was.
  };

  /// Finds the heads, plans their engines and binds the listeners, HTTP first, so that /healthz
  /// answers while weights are read. Errors are one line that names what to change.
  static absl::StatusOr<std::unique_ptr<Server>> Create(const ServerOptions& options,
                                                        const ServerParts& parts);
  /// Cuts what still runs.
  ~Server();

  /// Reads the weights, one head after the other; each is served as soon as its own is there
  /// (where devices of a replica wait for each other, once all are), and the server is ready once
  /// all are. CANCELLED after RequestStop; any other error ends the start.
  absl::Status Load();

  /// Serves until RequestStop or until no head has a replica left; then refuses new work (health
  /// and /readyz first), finishes what is in flight within the grace time and stops listening. Logs
  /// the loss of each of several replicas and heads; the other heads serve on.
  End Run();

  void RequestStop();

  /// Run reads the settings again (ServerParts::read_options), applies those that are reloadable
  /// and names the others that have changed in a warning. Settings that are wrong change nothing:
  /// an error is logged. Until Run is called it is put off.
  void RequestReload();

  /// A device that hangs would keep the destructor from returning.
  bool HasLostReplica() const;

  int grpc_port() const;
  int admin_port() const;  ///< 0 without an admin listener.
  int http_port() const;   ///< 0 without HTTP.
  /// Of what is loaded the memory that was really reserved.
  ServerPlan plan() const;

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
