#pragma once

#include <grpcpp/server.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "logprobd/v1/weights.grpc.pb.h"

namespace logprobd::testing {

/// A Weights service that records its requests and returns the answers that a test sets.
/// Thread-safe.
class FakeWeightsService final : public v1::Weights::Service {
 public:
  grpc::Status Load(grpc::ServerContext* context, const v1::LoadWeightsRequest* request,
                    grpc::ServerWriter<v1::LoadWeightsProgress>* writer) override;
  grpc::Status Commit(grpc::ServerContext* context, const v1::CommitWeightsRequest* request,
                      v1::WeightsResponse* response) override;
  grpc::Status Rollback(grpc::ServerContext* context, const v1::RollbackWeightsRequest* request,
                        v1::WeightsResponse* response) override;
  grpc::Status Discard(grpc::ServerContext* context, const v1::DiscardWeightsRequest* request,
                       v1::WeightsResponse* response) override;
  grpc::Status List(grpc::ServerContext* context, const v1::ListWeightsRequest* request,
                    v1::ListWeightsResponse* response) override;

  // Set these before the first call.

  /// The progress messages of a load, in order.
  std::vector<v1::LoadWeightsProgress>& progress() { return progress_; }
  /// The state that changes and List return.
  v1::HeadWeightsState& state() { return state_; }
  /// Ends every call with `status`; a load sends its messages first.
  void FailWith(grpc::Status status) { status_ = std::move(status); }
  /// Keeps a load running after its messages until it is cancelled.
  void HoldLoads() { holds_loads_ = true; }

  /// Each call's method and request, in short debug form: "Commit version: 2".
  std::vector<std::string> calls() const;
  /// Returns when a held load has been cancelled.
  void WaitForCancelled();

 private:
  void Record(const std::string& method, const google::protobuf::Message& request);

  std::vector<v1::LoadWeightsProgress> progress_;
  v1::HeadWeightsState state_;
  grpc::Status status_;
  bool holds_loads_ = false;
  mutable absl::Mutex mutex_;
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mutex_);
  bool is_cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

/// A server of the service on a free loopback port.
class FakeWeightsServer {
 public:
  FakeWeightsServer();
  ~FakeWeightsServer();

  FakeWeightsService& service() { return service_; }
  std::string address() const;

 private:
  FakeWeightsService service_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace logprobd::testing
