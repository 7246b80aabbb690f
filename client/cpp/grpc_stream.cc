#include "client/cpp/grpc_stream.h"

#include <grpcpp/support/stub_options.h>

#include <optional>
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
  queue_.emplace_back(std::in_place).value().Swap(&message);
  Continue();
}

bool GrpcStream::Withdraw(int64_t place) {
  std::optional<grpc::ByteBuffer> message;  // destroyed last: its memory is let go without the lock
  absl::MutexLock lock(&mutex_);
  const int64_t index = place - begun_;
  if (index < 0 || index >= static_cast<int64_t>(queue_.size())) return false;
  message.swap(queue_[static_cast<size_t>(index)]);
  return true;
}

void GrpcStream::CloseWrites() {
  absl::MutexLock lock(&mutex_);
  is_closing_ = true;
  if (!is_over_) Continue();
}

void GrpcStream::Cancel() { context_.TryCancel(); }

int64_t GrpcStream::written() const {
  absl::MutexLock lock(&mutex_);
  return is_writing_ ? begun_ - 1 : begun_;
}

void GrpcStream::Continue() {
  while (!is_writing_ && !queue_.empty()) {
    if (queue_.front().has_value()) {
      outgoing_.Swap(&*queue_.front());
      is_writing_ = true;
      StartWrite(&outgoing_);
    }
    queue_.pop_front();
    ++begun_;
  }
  if (!is_writing_ && is_closing_ && !has_closed_) {
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
