#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/message_stream.h"

namespace logprobd::client {

/// A MessageStream over one gRPC call. Keeps itself alive from Start until `ended` has returned.
class GrpcStream final : public MessageStream,
                         public std::enable_shared_from_this<GrpcStream>,
                         private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  GrpcStream(std::shared_ptr<grpc::Channel> channel, std::string method);

  /// Before Start.
  grpc::ClientContext& context() { return context_; }
  void set_events(StreamEvents events) { events_ = std::move(events); }

  void Start() override;
  void Write(grpc::ByteBuffer message) override;
  bool Withdraw(int64_t place) override;
  void CloseWrites() override;
  void Cancel() override;
  int64_t written() const override;

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  void Continue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string method_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  StreamEvents events_;
  std::shared_ptr<GrpcStream> self_;  ///< From Start to OnDone.
  grpc::ByteBuffer incoming_;         ///< gRPC's while a read is under way.

  mutable absl::Mutex mutex_;
  std::deque<std::optional<grpc::ByteBuffer>> queue_ ABSL_GUARDED_BY(mutex_);  ///< Null: withdrawn.
  grpc::ByteBuffer outgoing_ ABSL_GUARDED_BY(mutex_);  ///< gRPC's while a write is under way.
  int64_t begun_ ABSL_GUARDED_BY(mutex_) = 0;          ///< Messages that have left the queue.
  bool is_writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_over_ ABSL_GUARDED_BY(mutex_) = false;  ///< Nothing may be started any more.
};

}  // namespace logprobd::client
