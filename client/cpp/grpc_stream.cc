#include "client/cpp/grpc_stream.h"

#include <grpcpp/support/stub_options.h>

#include <utility>

namespace logprobd::client {

GrpcStream::GrpcStream(std::shared_ptr<grpc::Channel> channel, std::string method)
    : method_(std::move(method)), stub_(std::move(channel)) {}

void GrpcStream::Start() {
  self_ = shared_from_this();
  stub_.PrepareBidiStreamingCall(&context_, method_, grpc::StubOptions(), this);
  // Writes start outside of gRPC's reactions: OnDone must wait until there are no more of them.
  AddHold();
  StartRead(&incoming_);
  StartCall();
}

void GrpcStream::Write(grpc::ByteBuffer message) {
  absl::MutexLock lock(&mutex_);
  if (is_over_) return;
  queue_.emplace_back();
  queue_.back().Swap(&message);
  Continue();
}

void GrpcStream::CloseWrites() {
  absl::MutexLock lock(&mutex_);
  is_closing_ = true;
  if (!is_over_) Continue();
}

void GrpcStream::Cancel() { context_.TryCancel(); }

int64_t GrpcStream::written() const {
  absl::MutexLock lock(&mutex_);
  return written_;
}

void GrpcStream::Continue() {
  if (is_writing_) return;
  if (!queue_.empty()) {
    outgoing_.Swap(&queue_.front());
    queue_.pop_front();
    is_writing_ = true;
    StartWrite(&outgoing_);
  } else if (is_closing_ && !has_closed_) {
    has_closed_ = true;
    StartWritesDone();
  }
}

void GrpcStream::OnReadDone(bool ok) {
  if (ok) {
    grpc::ByteBuffer message;
    message.Swap(&incoming_);
    events_.received(message);
    StartRead(&incoming_);
    return;
  }
  {
    absl::MutexLock lock(&mutex_);
    is_over_ = true;
  }
  RemoveHold();
}

void GrpcStream::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  is_writing_ = false;
  outgoing_.Clear();
  if (!ok) is_over_ = true;
  ++written_;
  if (!is_over_) Continue();
}

void GrpcStream::OnDone(const grpc::Status& status) {
  const std::shared_ptr<GrpcStream> self = std::move(self_);
  {
    absl::MutexLock lock(&mutex_);
    queue_.clear();
  }
  std::move(events_.ended)(
      absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message()));
}

}  // namespace logprobd::client
