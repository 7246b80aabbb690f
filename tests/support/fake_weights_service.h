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

  /// Returns the progress messages that a load sends, in order.
  std::vector<v1::LoadWeightsProgress>& progress() { return progress_; }
  /// Returns the state that Commit, Rollback, Discard and List return.
  v1::HeadWeightsState& state() { return state_; }
  /// Makes every call end with `status`. A load sends its messages first.
  void FailWith(grpc::Status status) { status_ = std::move(status); }
  /// Keeps a load running after its messages until it is cancelled.
  void HoldLoads() { holds_loads_ = true; }

  /// Returns each call's method and request in short debug form, such as "Commit version: 2".
  std::vector<std::string> calls() const;
  /// Blocks until a held load has been cancelled.
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

/// A server of FakeWeightsService on a free loopback port.
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
