#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/client_callback.h"
#include "logprobd/v1/scoring.pb.h"

namespace logprobd::testing {

/// A raw ScoreStream client. It queues writes and sends them one after the other, and reads a
/// response only on demand. Thread-safe. The destructor ends the call.
class TestStream final : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit TestStream(const std::shared_ptr<grpc::Channel>& channel,
                      const std::map<std::string, std::string>& metadata = {});
  ~TestStream() override;

  void Send(absl::string_view message);
  void Send(const v1::ScoreRequest& chunk) { Send(chunk.SerializeAsString()); }
  /// Half-closes the stream after the queued chunks.
  void CloseWrites();
  void Cancel() { context_.TryCancel(); }

  /// Returns the next response. The stream must not have ended.
  v1::ScoreResponse Read();
  /// Reads until the server ends the stream, and returns its status.
  grpc::Status Finish();

 private:
  void OnWriteDone(bool ok) override;
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  bool ReadOne(v1::ScoreResponse& response);
  void StartNextWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer outgoing_;
  grpc::ByteBuffer incoming_;
  absl::Mutex mutex_;
  std::deque<std::string> writes_ ABSL_GUARDED_BY(mutex_);
  bool is_writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closes_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool read_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool read_ok_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_done_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logprobd::testing
