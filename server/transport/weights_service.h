#pragma once

#include <atomic>
#include <memory>

#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "logprobd/v1/weights.grpc.pb.h"
#include "server/base/clock.h"
#include "server/base/weight_store.h"
#include "server/transport/call_info.h"
#include "server/transport/same_host_access.h"

namespace logprobd {

/// The Weights service, with raw methods like ScoringService. Each call runs on a thread of its
/// own, because it may take as long as reading a weight. At most kCallsMax calls run at once.
class WeightsService final
    : public v1::Weights::WithRawCallbackMethod_Load<v1::Weights::WithRawCallbackMethod_Push<
          v1::Weights::WithRawCallbackMethod_Commit<v1::Weights::WithRawCallbackMethod_Rollback<
              v1::Weights::WithRawCallbackMethod_Discard<
                  v1::Weights::WithRawCallbackMethod_List<v1::Weights::Service>>>>>> {
 public:
  static constexpr int kCallsMax = 32;

  /// The arguments must live until the count of work() is 0. If `same_host` is null, pushed rows
  /// must be in the messages.
  WeightsService(WeightStore& store, const SameHostAccess* same_host, const Clock& clock)
      : store_(store), same_host_(same_host), clock_(clock), work_(std::make_shared<WorkCount>()) {}

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Load(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* Push(grpc::CallbackServerContext* context,
                                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Rollback(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Discard(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* request,
                                 grpc::ByteBuffer* response) override;

  /// Refuses later calls with UNAVAILABLE, and ends pushes that wait for rows.
  void RefuseNew() { refuses_new_ = true; }
  /// Returns the count of the calls whose thread is still running.
  WorkCount& work() { return *work_; }

 private:
  /// Returns OK if one more call may run.
  absl::Status CheckRoom() const;

  WeightStore& store_;
  const SameHostAccess* const same_host_;
  const Clock& clock_;
  const std::shared_ptr<WorkCount> work_;  // shared with the threads, which call End() last
  std::atomic<bool> refuses_new_ = false;
};

}  // namespace logprobd
