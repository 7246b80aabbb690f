#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/app/heads/plan.h"
#include "server/app/options/server_options.h"

namespace logprobd {

/// The server with all its parts. Its functions are called in this order:
///
///   Create (listens; health reports NOT_SERVING) -> Load (reads the weights; ready) -> Run
///   (serves)
///
/// Load and Run must be called from one thread. RequestStop and RequestReload may be called from
/// any thread at any time.
class Server {
 public:
  enum class End {
    kStopped,  ///< Stopped as requested; all work was finished.
    kWorkCut,  ///< Stopped as requested, but the grace time passed before all work was finished.
    kEngineFailed,  ///< Every replica of every head failed; all other requests were answered.
  };

  /// Finds the heads, plans their engines and binds the listeners, HTTP first, so that /healthz
  /// responds while weights are read. An error is one line that says what to change.
  static absl::StatusOr<std::unique_ptr<Server>> Create(const ServerOptions& options,
                                                        const ServerParts& parts);
  /// Cancels the calls that are still running.
  ~Server();

  /// Reads the weights of one head after another. Each head is served as soon as it is loaded, or,
  /// if devices of a replica wait for each other, once all are loaded. The server is ready when all
  /// heads are loaded. Returns CANCELLED after RequestStop; any other error ends the start.
  absl::Status Load();

  /// Serves until RequestStop or until no head has a healthy replica left. Then it refuses new work
  /// (health and /readyz first), finishes the work in flight within the grace time and stops
  /// listening. The loss of one of several replicas or heads is logged, and the others continue to
  /// serve.
  End Run();

  void RequestStop();

  /// Makes Run read the settings again (ServerParts::read_options), apply those that are reloadable
  /// and name the other changed settings in a warning. Invalid settings change nothing and are
  /// logged as an error. A request before Run is handled when Run starts.
  void RequestReload();

  /// Returns whether a replica has failed or a dropped version of the weights is not destroyed yet.
  /// Its device may hang and thereby block the destructor.
  bool MayHang() const;

  int grpc_port() const;
  std::string admin_address() const;  ///< See GrpcServer::admin_address.
  int http_port() const;              ///< Returns 0 if HTTP is off.
  /// Returns the plan; for loaded heads it contains the memory in use.
  ServerPlan plan() const;

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
