#pragma once

#include <grpc/support/time.h>
#include <grpcpp/channel.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/channel_arguments.h>

#include <cstdint>
#include <map>
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

/// Implements RpcTransport over gRPC. Each server has several channels, each with its own
/// connection, which its calls use in turn. They are opened at the first call.
class GrpcTransport final : public RpcTransport {
 public:
  struct Options {
    int32_t channels = 4;  ///< Number of connections to each server.
    std::string client_id = {};
    std::string token = {};  ///< Sent with each call; empty means none.
    ChannelSecurity security = {};
  };

  explicit GrpcTransport(Options options);
  /// Calls Shutdown(), then waits for the last callback.
  ~GrpcTransport() override;

  std::shared_ptr<CancelScope> NewScope() override;
  /// The request must name its server.
  void Call(RpcRequest&& request, RpcDone done) override;
  void After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
             absl::AnyInvocable<void() &&> callback) override;
  absl::Time Now() const override;
  void KeepServers(const std::vector<std::string>& servers) override;

  /// See RpcTransport::Shutdown. It also closes the connections.
  void Shutdown() override;

 private:
  class Scope;
  struct CallState;
  class Timer;
  /// The connections to a server.
  struct Server {
    std::vector<std::shared_ptr<grpc::Channel>> channels;
    uint32_t turn = 0;
    int64_t inflight = 0;
  };

  /// Returns the next channel to a server, or null after Shutdown(). The caller must call
  /// FinishOne() when it no longer uses the channel.
  std::shared_ptr<grpc::Channel> NextChannel(const std::string& server);
  /// Notes that a call to a server, or a timer (""), has ended.
  void FinishOne(const std::string& server);

  const Options options_;
  std::shared_ptr<Scope> all_;

  absl::Mutex mutex_;
  std::map<std::string, Server> servers_ ABSL_GUARDED_BY(mutex_);
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t live_ ABSL_GUARDED_BY(mutex_) = 0;  // calls and timers whose callback has not returned
};

}  // namespace logprobd::client
