#pragma once

#include <grpc/support/time.h>
#include <grpcpp/channel.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/channel_arguments.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/rpc_transport.h"
#include "client/cpp/secure_channel.h"

namespace logprobd::client {

/// Returns the gRPC settings of all channels to a server.
grpc::ChannelArguments ChannelArgumentsForServers();

/// Returns the hint in a value of grpc-retry-pushback-ms. As in gRPC, a value that is no number
/// forbids a retry: it gives a negative duration.
absl::Duration ParsePushback(absl::string_view value);

/// Returns the time `delay` from now, on gRPC's monotonic clock.
gpr_timespec GprDeadline(absl::Duration delay);

/// Implements RpcTransport over several gRPC channels, each with its own connection, which calls
/// use in turn.
class GrpcTransport final : public RpcTransport {
 public:
  struct Options {
    std::string address = {};
    int32_t channels = 4;  ///< With 0 the transport provides delays only.
    std::string client_id = {};
    std::string token = {};  ///< Sent with each call; empty means none.
    ChannelSecurity security = {};
  };

  explicit GrpcTransport(const Options& options);
  /// Calls Shutdown(), then waits for the last callback.
  ~GrpcTransport() override;

  std::shared_ptr<CancelScope> NewScope() override;
  void Call(const std::string& method, grpc::ByteBuffer request, absl::Time deadline,
            const std::shared_ptr<CancelScope>& scope, RpcDone done) override;
  void After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
             absl::AnyInvocable<void() &&> callback) override;
  absl::Time Now() const override;

  /// See RpcTransport::Shutdown. It also closes the connections.
  void Shutdown() override;

 private:
  class Scope;
  struct CallState;
  class Timer;

  /// Returns the next channel, or null after Shutdown(). The caller must call FinishOne() when it
  /// no longer uses the channel.
  std::shared_ptr<grpc::Channel> NextChannel();
  void FinishOne();

  const std::string client_id_;
  const std::string token_;
  std::atomic<uint32_t> next_channel_{0};
  std::shared_ptr<Scope> all_;

  absl::Mutex mutex_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_ ABSL_GUARDED_BY(mutex_);
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t live_ ABSL_GUARDED_BY(mutex_) = 0;  // calls and timers whose callback has not returned
};

}  // namespace logprobd::client
