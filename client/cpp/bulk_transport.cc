#include "client/cpp/bulk_transport.h"

#include <utility>

namespace logprobd::client {

BulkTransport::BulkTransport(const GrpcTransport::Options& options,
                             std::shared_ptr<const std::atomic<int64_t>> window)
    : window_(std::move(window)),
      connections_(options),
      streams_(connections_, connections_, options.channels) {}

// Before the streams go: no event may come to them any more.
BulkTransport::~BulkTransport() { connections_.Shutdown(); }

void BulkTransport::Call(const std::string& method, grpc::ByteBuffer request, absl::Time deadline,
                         const std::shared_ptr<CancelScope>& scope, RpcDone done) {
  streams_.SetWindow(window_->load(std::memory_order_relaxed));
  streams_.Call(method, request, deadline, scope, std::move(done));
}

}  // namespace logprobd::client
