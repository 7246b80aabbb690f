#pragma once

#include <atomic>
#include <memory>

#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "logprobd/v1/weights.grpc.pb.h"
#include "server/base/clock.h"
#include "server/base/weight_store.h"
#include "server/transport/access_list.h"
#include "server/transport/audit.h"
#include "server/transport/call_info.h"
#include "server/transport/same_host_access.h"

namespace logprobd {

/// The Weights service, with raw methods like ScoringService. Each call runs on a thread of its
/// own, because it may take as long as reading a weight. Pushes have a limit of their own, so that
/// open ones never keep out the calls that roll back or discard.
class WeightsService final
    : public v1::Weights::WithRawCallbackMethod_Load<v1::Weights::WithRawCallbackMethod_Push<
          v1::Weights::WithRawCallbackMethod_Commit<v1::Weights::WithRawCallbackMethod_Rollback<
              v1::Weights::WithRawCallbackMethod_Discard<
                  v1::Weights::WithRawCallbackMethod_List<v1::Weights::Service>>>>>> {
 public:
  /// Maximum number of calls other than pushes that run at once.
  static constexpr int kCallsMax = 32;
  /// Maximum number of pushes at once. Each holds a thread, and messages that count against gRPC's
  /// quota. A push above it is refused with a retry hint.
  static constexpr int kPushesMax = 256;

  /// The arguments must live until AwaitNone has returned true. If `same_host` is null, pushed rows
  /// must be in the messages. If `access` is null, callers need no entry. With `audit_required` a
  /// change is refused if its line cannot be written.
  WeightsService(WeightStore& store, const SameHostAccess* same_host, const AccessList* access,
                 bool audit_required, const Clock& clock)
      : store_(store),
        same_host_(same_host),
        access_(access),
        audit_required_(audit_required),
        clock_(clock) {}

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
  /// Waits until no call's thread is running or `clock` reaches `until`. Returns whether none is.
  bool AwaitNone(const Clock& clock, absl::Time until) {
    return calls_->AwaitNone(clock, until) && pushes_->AwaitNone(clock, until);
  }

 private:
  /// Returns OK if one more call may run beside those that `running` counts.
  absl::Status CheckRoom(const WorkCount& running, int max) const;
  absl::Status CheckRoom() const { return CheckRoom(*calls_, kCallsMax); }
  /// Returns the lines of a call of `method`.
  ChangeAudit AuditOf(absl::string_view method, const grpc::CallbackServerContext& context) const {
    return {CallerOf(context, access_), method, audit_required_};
  }
  /// Starts a call that asks in a `Message` for the change that `change(store, message)` makes.
  template <typename Message, typename Change>
  grpc::ServerUnaryReactor* StartChange(absl::string_view method,
                                        const grpc::CallbackServerContext& context,
                                        const grpc::ByteBuffer& request, grpc::ByteBuffer& response,
                                        Change change);

  WeightStore& store_;
  const SameHostAccess* const same_host_;
  const AccessList* const access_;
  const bool audit_required_;
  const Clock& clock_;
  // Shared with the threads, which call End() last.
  const std::shared_ptr<WorkCount> calls_ = std::make_shared<WorkCount>();  // except pushes
  const std::shared_ptr<WorkCount> pushes_ = std::make_shared<WorkCount>();
  std::atomic<bool> refuses_new_ = false;
};

}  // namespace logprobd
