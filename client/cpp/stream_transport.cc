#include "client/cpp/stream_transport.h"

#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/server_messages.h"
#include "logprobd/v1/scoring.pb.h"

namespace logprobd::client {

namespace {

constexpr int64_t kWindowUnknown = 8;

/// Returns the request with what belongs to a chunk in front of it, which is valid because protobuf
/// fields may come in any order. The result shares the slices of the request and does not copy
/// them.
grpc::ByteBuffer AsChunk(const grpc::ByteBuffer& request, uint64_t id,
                         const std::string& traceparent) {
  v1::ScoreRequest prefix;
  prefix.set_chunk_id(id);
  prefix.set_traceparent(traceparent);  // The metadata of a stream belongs to all of its chunks.
  std::vector<grpc::Slice> slices;
  request.Dump(&slices).ok();  // a request that was just encoded is not compressed
  slices.insert(slices.begin(), grpc::Slice(prefix.SerializeAsString()));
  return {slices.data(), slices.size()};
}

bool ParseResponse(const grpc::ByteBuffer& message, v1::ScoreResponse* response) {
  grpc::ByteBuffer bytes = message;  // the reader empties it; only references are copied
  grpc::ProtoBufferReader reader(&bytes);
  return reader.status().ok() && response->ParseFromZeroCopyStream(&reader);
}

}  // namespace

/// A stream and its unanswered chunks.
struct StreamTransport::Lane {
  std::shared_ptr<MessageStream> stream;
  /// Ids of the chunks that occupy the window. A chunk stays here even if its call has ended.
  absl::flat_hash_set<uint64_t> unanswered;
  int64_t sent = 0;
  absl::Status broken;  ///< Why this client cancelled the stream; then later events are ignored.
};

struct StreamTransport::Chunk {
  grpc::ByteBuffer request;  ///< Shares the slices; kept because the request may be sent again.
  absl::Time deadline;
  std::shared_ptr<Scope> scope;
  std::shared_ptr<CancelScope> timer;  ///< Null without a deadline.
  RpcDone done;                        ///< Null once the call has ended.
  std::shared_ptr<Lane> lane;          ///< Null while the chunk waits.
  int64_t index = 0;                   ///< Position among the messages of its lane.
};

class StreamTransport::Scope final : public CancelScope {
 public:
  Scope(StreamTransport& owner, std::shared_ptr<CancelScope> inner)
      : owner_(owner), inner_(std::move(inner)) {}

  void Cancel() override {
    inner_->Cancel();
    owner_.CancelChunks(*this);
  }

  const std::shared_ptr<CancelScope>& inner() const { return inner_; }

  bool is_cancelled = false;  ///< Guarded by the owner's mutex.

 private:
  StreamTransport& owner_;
  const std::shared_ptr<CancelScope> inner_;
};

StreamTransport::StreamTransport(RpcTransport& inner, StreamOpener& opener, int32_t streams)
    : inner_(inner),
      opener_(opener),
      window_(kWindowUnknown),
      lanes_(static_cast<size_t>(streams)) {}

StreamTransport::~StreamTransport() = default;

void StreamTransport::SetWindow(int64_t window) {
  absl::MutexLock lock(&mutex_);
  window_ = window > 0 ? window : kWindowUnknown;
}

std::shared_ptr<CancelScope> StreamTransport::NewScope() {
  return std::make_shared<Scope>(*this, inner_.NewScope());
}

void StreamTransport::After(absl::Duration delay, const std::shared_ptr<CancelScope>& scope,
                            absl::AnyInvocable<void() &&> callback) {
  inner_.After(delay, scope == nullptr ? nullptr : std::static_pointer_cast<Scope>(scope)->inner(),
               std::move(callback));
}

void StreamTransport::Call(const std::string& method, grpc::ByteBuffer request, absl::Time deadline,
                           const std::shared_ptr<CancelScope>& scope, RpcDone done) {
  auto own_scope = std::static_pointer_cast<Scope>(scope);
  if (method != kScoreMethod) {
    inner_.Call(method, request, deadline, own_scope->inner(), std::move(done));
    return;
  }
  std::shared_ptr<CancelScope> timer;
  if (deadline != absl::InfiniteFuture()) timer = inner_.NewScope();
  Replies replies;
  uint64_t id = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (own_scope->is_cancelled) {
      replies.emplace_back(
          std::move(done),
          RpcReply{.status = absl::CancelledError("the call was cancelled before it was sent")});
    } else {
      id = ++last_id_;
      Chunk& chunk = chunks_[id];
      chunk.request = AsChunk(request, id, own_scope->traceparent);
      chunk.deadline = deadline;
      chunk.scope = std::move(own_scope);
      chunk.timer = timer;
      chunk.done = std::move(done);
      waiting_.push_back(id);
      SendWaiting(replies);
    }
  }
  request.Clear();
  if (id != 0 && timer != nullptr) {
    // If the chunk has already ended, the timer's scope is cancelled, so the timer fires at once
    // and has no effect.
    inner_.After(std::max(deadline - inner_.Now(), absl::ZeroDuration()), timer,
                 [this, id] { Expire(id); });
  }
  Deliver(replies);
}

void StreamTransport::SendWaiting(Replies& replies) {
  while (!waiting_.empty()) {
    const uint64_t id = waiting_.front();
    const auto found = chunks_.find(id);
    if (found == chunks_.end()) {
      waiting_.pop_front();
      continue;
    }
    const std::shared_ptr<Lane> lane = LaneWithRoom();
    if (lane == nullptr) {
      waiting_.pop_front();
      End(id, {.status = absl::CancelledError("the client is shutting down")}, replies);
      continue;
    }
    if (static_cast<int64_t>(lane->unanswered.size()) >= window_) return;
    waiting_.pop_front();
    Chunk& chunk = found->second;
    chunk.lane = lane;
    chunk.index = lane->sent++;
    lane->unanswered.insert(id);
    lane->stream->Write(chunk.request);
  }
}

std::shared_ptr<StreamTransport::Lane> StreamTransport::LaneWithRoom() {
  const auto load = [](const std::shared_ptr<Lane>& lane) {
    return lane == nullptr ? size_t{0} : lane->unanswered.size();
  };
  std::shared_ptr<Lane>& lane =
      *std::min_element(lanes_.begin(), lanes_.end(),
                        [&load](const auto& a, const auto& b) { return load(a) < load(b); });
  if (lane != nullptr) return lane;
  auto opened = std::make_shared<Lane>();
  opened->stream = opener_.OpenStream(
      kScoreStreamMethod,
      {.received = [this, opened](const grpc::ByteBuffer& message) { Received(opened, message); },
       .ended = [this, opened](const absl::Status& status) { Ended(opened, status); }});
  if (opened->stream == nullptr) return nullptr;
  opened->stream->Start();
  lane = opened;
  return opened;
}

void StreamTransport::End(uint64_t id, RpcReply reply, Replies& replies) {
  const auto found = chunks_.find(id);
  if (found == chunks_.end()) return;
  // Cancelling fires the timer; Expire then finds no chunk.
  if (found->second.timer != nullptr) found->second.timer->Cancel();
  if (found->second.done != nullptr) {
    replies.emplace_back(std::move(found->second.done), std::move(reply));
  }
  chunks_.erase(found);
}

bool StreamTransport::GiveUp(uint64_t id, const absl::Status& status, Replies& replies) {
  Chunk& chunk = chunks_.at(id);
  const std::shared_ptr<Lane> lane = chunk.lane;
  if (lane != nullptr && lane->stream->Withdraw(chunk.index)) {
    lane->unanswered.erase(id);  // no answer will come
  } else if (lane != nullptr && chunk.index >= lane->stream->written()) {
    if (chunk.done != nullptr) {
      replies.emplace_back(std::exchange(chunk.done, nullptr), RpcReply{.status = status});
      chunk.request.Clear();
    }
    return false;
  }
  End(id, {.status = status}, replies);
  return true;
}

void StreamTransport::Abandon(const std::shared_ptr<Lane>& lane) {
  lane->broken = absl::CancelledError("the client gave the stream up");
  lane->stream->Cancel();
  std::replace(lanes_.begin(), lanes_.end(), lane, std::shared_ptr<Lane>());
  // Ids ascend in the order in which chunks were first sent.
  std::vector<uint64_t> again(lane->unanswered.begin(), lane->unanswered.end());
  lane->unanswered.clear();
  std::sort(again.rbegin(), again.rend());
  for (const uint64_t id : again) {
    const auto found = chunks_.find(id);
    if (found == chunks_.end()) continue;
    if (found->second.done == nullptr) {
      chunks_.erase(found);
      continue;
    }
    found->second.lane = nullptr;
    waiting_.push_front(id);
  }
}

void StreamTransport::CloseIdle() {
  for (std::shared_ptr<Lane>& lane : lanes_) {
    if (lane == nullptr || !lane->unanswered.empty()) continue;
    lane->stream->CloseWrites();
    lane = nullptr;
  }
}

void StreamTransport::Received(const std::shared_ptr<Lane>& lane, const grpc::ByteBuffer& message) {
  v1::ScoreResponse response;
  const bool is_response = ParseResponse(message, &response);
  Replies replies;
  {
    absl::MutexLock lock(&mutex_);
    if (!lane->broken.ok()) return;
    if (!is_response || lane->unanswered.erase(response.chunk_id()) == 0) {
      lane->broken = absl::InternalError(
          is_response ? absl::StrCat("the server answered chunk ", response.chunk_id(),
                                     ", which was not sent to it")
                      : "the server's answer is not a ScoreResponse");
      lane->stream->Cancel();
      return;
    }
    RpcReply reply;
    if (response.status_code() == 0) {
      reply.body = message;
    } else {
      reply.status = {static_cast<absl::StatusCode>(response.status_code()),
                      response.status_message()};
      if (response.retry_after_ms() > 0) reply.pushback = absl::StrCat(response.retry_after_ms());
    }
    End(response.chunk_id(), std::move(reply), replies);
    SendWaiting(replies);
    CloseIdle();
  }
  Deliver(replies);
}

void StreamTransport::Ended(const std::shared_ptr<Lane>& lane, const absl::Status& status) {
  Replies replies;
  {
    absl::MutexLock lock(&mutex_);
    absl::Status reason = lane->broken.ok() ? status : lane->broken;
    if (reason.ok()) reason = absl::UnavailableError("the server ended the stream");
    std::replace(lanes_.begin(), lanes_.end(), lane, std::shared_ptr<Lane>());
    for (const uint64_t id : lane->unanswered) End(id, {.status = reason}, replies);
    lane->unanswered.clear();
    // The stream's events refer to the lane, so the reset breaks a reference cycle.
    lane->stream.reset();
    SendWaiting(replies);
  }
  Deliver(replies);
}

void StreamTransport::Expire(uint64_t id) {
  Replies replies;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = chunks_.find(id);
    if (found == chunks_.end()) return;
    const std::shared_ptr<Lane> lane = found->second.lane;
    const absl::Status status = inner_.Now() < found->second.deadline
                                    ? absl::CancelledError("the client is shutting down")
                                    : absl::DeadlineExceededError("Deadline Exceeded");
    // The caller's memory stays in use until the connection has sent the message completely.
    if (!GiveUp(id, status, replies)) Abandon(lane);
    SendWaiting(replies);
    CloseIdle();
  }
  Deliver(replies);
}

void StreamTransport::CancelChunks(Scope& scope) {
  Replies replies;
  {
    absl::MutexLock lock(&mutex_);
    scope.is_cancelled = true;
    std::vector<uint64_t> ids;
    for (const auto& [id, chunk] : chunks_) {
      if (chunk.scope.get() == &scope) ids.push_back(id);
    }
    for (const uint64_t id : ids) GiveUp(id, absl::CancelledError("cancelled"), replies);
    SendWaiting(replies);
    CloseIdle();
  }
  Deliver(replies);
}

void StreamTransport::Deliver(Replies& replies) {
  for (auto& [done, reply] : replies) std::move(done)(std::move(reply));
}

BulkTransport::BulkTransport(const GrpcTransport::Options& options,
                             std::shared_ptr<const std::atomic<int64_t>> window)
    : window_(std::move(window)),
      connections_(options),
      streams_(connections_, connections_, options.channels) {}

// Shuts down first, because `streams_` must receive no event after its destruction.
BulkTransport::~BulkTransport() { connections_.Shutdown(); }

void BulkTransport::Call(const std::string& method, grpc::ByteBuffer request, absl::Time deadline,
                         const std::shared_ptr<CancelScope>& scope, RpcDone done) {
  streams_.SetWindow(window_->load(std::memory_order_relaxed));
  streams_.Call(method, request, deadline, scope, std::move(done));
}

}  // namespace logprobd::client
