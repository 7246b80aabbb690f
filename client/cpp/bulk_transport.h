#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "client/cpp/grpc_transport.h"
#include "client/cpp/rpc_transport.h"
#include "client/cpp/stream_transport.h"

namespace logprobd::client {

/// The connections to one server, over which Score requests travel as chunks of ScoreStream calls,
/// at most one on each connection, and everything else as unary calls. Thread-safe.
class BulkTransport final : public RpcTransport {
 public:
  /// `window` is that of StreamTransport::SetWindow; read at each request.
  BulkTransport(const GrpcTransport::Options& options,
                std::shared_ptr<const std::atomic<int64_t>> window);
  /// Shutdown().
  ~BulkTransport() override;

  std::shared_ptr<CancelScope> NewScope() override { return streams_.NewScope(); }
  void Call(const std::string& method, grpc::ByteBuffer request, absl::Time deadline,
            const std::shared_ptr<CancelScope>& scope, RpcDone done) override;
  void After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
             absl::AnyInvocable<void() &&> callback) override {
    streams_.After(delay, scope, std::move(callback));
  }
  absl::Time Now() const override { return connections_.Now(); }
  void Shutdown() override { connections_.Shutdown(); }

 private:
  const std::shared_ptr<const std::atomic<int64_t>> window_;
  GrpcTransport connections_;
  StreamTransport streams_;
};

}  // namespace logprobd::client
