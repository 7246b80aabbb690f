#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/grpc_transport.h"
#include "client/cpp/rpc_transport.h"

namespace logprobd::client {

/// Sends Score requests as chunks of ScoreStream calls, and other requests through `inner`.
///
/// A chunk is sent on the stream with the fewest unanswered chunks. Each stream has at most
/// `window` unanswered chunks; further chunks wait. Answers may arrive in any order. An answer ends
/// its Call with the chunk's own status and retry hint. If a stream breaks, its calls end with its
/// status. A stream is opened when there is a chunk to send and closed when all its chunks are
/// answered, so that an idle client does not delay a server's shutdown.
///
/// If a call is cancelled or its deadline passes, the other calls of its stream go on. The call's
/// request is withdrawn if the connection has not started to send it. If a request is partly sent
/// when its deadline passes, its stream is cancelled, and the stream's other chunks are sent again
/// on another stream.
class StreamTransport final : public RpcTransport {
 public:
  /// `streams` is the maximum number of streams that are open at once, >= 1. `inner` and `opener`
  /// must outlive this object, and must call no stream event and no timer after its destruction.
  StreamTransport(RpcTransport& inner, StreamOpener& opener, int32_t streams);
  ~StreamTransport() override;

  /// Sets the maximum number of unanswered chunks per stream (Limits::stream_window). 0 means that
  /// the limit is unknown; then it is 8.
  void SetWindow(int64_t window);

  std::shared_ptr<CancelScope> NewScope() override;
  void Call(const std::string& method, grpc::ByteBuffer request, absl::Time deadline,
            const std::shared_ptr<CancelScope>& scope, RpcDone done) override;
  void After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
             absl::AnyInvocable<void() &&> callback) override;
  absl::Time Now() const override { return inner_.Now(); }

 private:
  class Scope;
  struct Lane;
  struct Chunk;
  using Replies = std::vector<std::pair<RpcDone, RpcReply>>;

  /// Moves waiting chunks to streams with room. Calls that end are added to `replies`.
  void SendWaiting(Replies& replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Returns the lane with the fewest unanswered chunks, and opens it if necessary. Returns null
  /// once the transport is shut down.
  std::shared_ptr<Lane> LaneWithRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Removes a chunk. Its call, if it still waits, ends with `reply`.
  void End(uint64_t id, RpcReply reply, Replies& replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Ends a chunk without an answer. Returns false if the connection is sending the request; then
  /// the call ends, but the chunk stays until it is answered or its deadline passes.
  bool GiveUp(uint64_t id, const absl::Status& status, Replies& replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Cancels the stream of `lane`. Its unanswered chunks wait for another stream.
  void Abandon(const std::shared_ptr<Lane>& lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Closes the streams whose chunks are all answered.
  void CloseIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Received(const std::shared_ptr<Lane>& lane, const grpc::ByteBuffer& message);
  void Ended(const std::shared_ptr<Lane>& lane, const absl::Status& status);
  void Expire(uint64_t id);
  void CancelChunks(Scope& scope);
  static void Deliver(Replies& replies);

  RpcTransport& inner_;
  StreamOpener& opener_;

  absl::Mutex mutex_;
  int64_t window_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  /// A lane without an open stream is null.
  std::vector<std::shared_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, Chunk> chunks_ ABSL_GUARDED_BY(mutex_);
  std::deque<uint64_t> waiting_ ABSL_GUARDED_BY(mutex_);  ///< Chunk ids; some may have ended.
};

/// The connections to one server. Score requests are sent as chunks of ScoreStream calls, at most
/// one such call per connection, and all other requests as unary calls. Thread-safe.
class BulkTransport final : public RpcTransport {
 public:
  /// `window` is the argument of StreamTransport::SetWindow; it is read for each request.
  BulkTransport(const GrpcTransport::Options& options,
                std::shared_ptr<const std::atomic<int64_t>> window);
  /// Calls Shutdown().
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
