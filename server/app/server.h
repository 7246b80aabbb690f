#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/app/plan.h"
#include "server/app/server_options.h"
#include "server/base/clock.h"
#include "server/base/scoring_engine.h"
#include "server/engine/engines.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// What a server is made of, so that tests can put in their own.
struct ServerParts {
  std::function<absl::StatusOr<ModelFolderHead>(const std::string& path,
                                                const ModelFolderOptions& options)>
      open_model = OpenModelFolder;
  std::function<absl::StatusOr<EnginePlan>(const HeadInfo& head, const EngineOptions& options)>
      plan_engine = PlanEngine;
  std::function<absl::StatusOr<std::vector<std::unique_ptr<ScoringEngine>>>(
      const HeadWeights& weights, const EnginePlan& plan, const EngineOptions& options)>
      create_engines = CreateEngines;
  const Clock* clock = &Clock::Steady();
  /// Draw the loading on standard error.
  bool progress_on_terminal = false;
};

/// A head as found and what serving it would take; reads headers, the bias and at most samples of
/// the weight, and opens no port.
struct PlannedHead {
  std::unique_ptr<HeadWeights> weights;
  ServingPlan plan;
};
absl::StatusOr<PlannedHead> PlanHead(const ServerOptions& options, const ServerParts& parts);

/// The server: every part built in order, one life.
///
///   Create (listens; health says no) -> Load (reads the weight; ready) -> Run (until it is to
///   stop)
///
/// Load and Run from one thread; RequestStop from any, at any time.
class Server {
 public:
  enum class End {
    kStopped,       ///< As asked, all work finished.
    kWorkCut,       ///< As asked, but the grace time passed before all work was finished.
    kEngineFailed,  ///< Every replica failed; what could be answered was.
  };

  /// Finds the head, plans its engine and binds the listeners, HTTP first, so that /healthz answers
  /// while the weight is read. Errors are one line that names what to change.
  static absl::StatusOr<std::unique_ptr<Server>> Create(const ServerOptions& options,
                                                        const ServerParts& parts);
  /// Cuts what still runs.
  ~Server();

  /// Reads the weight and begins to serve. CANCELLED after RequestStop.
  absl::Status Load();

  /// Serves until RequestStop or until no replica is left; then refuses new work (health and
  /// /readyz first), finishes what is in flight within the grace time and stops listening. Logs the
  /// loss of each of several replicas.
  End Run();

  void RequestStop();

  /// A device that hangs would keep the destructor from returning.
  bool HasLostReplica() const;

  int grpc_port() const;
  int http_port() const;  ///< 0 without HTTP.
  const ServingPlan& plan() const;

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
