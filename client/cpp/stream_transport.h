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

/// Sends Score requests as chunks of ScoreStream calls, and everything else as `inner` does.
///
/// A chunk goes to the stream with the fewest unanswered ones, at most a window on each; the rest
/// wait here. Its answer, in whatever order it comes, ends its Call with the chunk's own status,
/// and the time to wait before sending it again as pushback. A stream that breaks ends the calls on
/// it with its status. A stream is opened when there is something to send and closed when
/// everything on it is answered, so that an idle client does not hold up a server that is shutting
/// down.
///
/// A call that is cancelled, or whose deadline passes, ends alone, and its request is taken back
/// where the connection has not begun to take it. A request that is half way when the deadline
/// passes costs its stream: what else was unanswered there is sent again on another one.
class StreamTransport final : public RpcTransport {
 public:
  /// At most `streams` at once, >= 1. `inner` and `opener` must outlive this, and call no event of
  /// a stream and no timer once this is gone.
  StreamTransport(RpcTransport& inner, StreamOpener& opener, int32_t streams);
  ~StreamTransport() override;

  /// Most unanswered chunks on a stream (Limits::stream_window); 0: not known, 8.
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

  /// Moves waiting chunks to streams with room; calls that end are added to `replies`.
  void SendWaiting(Replies& replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// The lane with the fewest unanswered chunks, opened if need be; null when shut down.
  std::shared_ptr<Lane> LaneWithRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// The chunk needs no more: its call, if it waits still, ends with `reply`.
  void End(uint64_t id, RpcReply reply, Replies& replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// As End, before an answer came. False: the connection is taking the request, and the chunk
  /// stays until it has been answered or its deadline passes.
  bool GiveUp(uint64_t id, const absl::Status& status, Replies& replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Ends the stream; what is unanswered on it waits for another one.
  void Abandon(const std::shared_ptr<Lane>& lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Closes the streams on which everything is answered.
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
  std::vector<std::shared_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mutex_);  ///< Null: no stream.
  absl::flat_hash_map<uint64_t, Chunk> chunks_ ABSL_GUARDED_BY(mutex_);
  std::deque<uint64_t> waiting_ ABSL_GUARDED_BY(mutex_);  ///< Ids; some may have ended meanwhile.
};

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
