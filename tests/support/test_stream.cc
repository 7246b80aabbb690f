#include "tests/support/test_stream.h"

#include "server/base/errors.h"
#include "tests/support/transport_server.h"

namespace logprobd::testing {

TestStream::TestStream(const std::shared_ptr<grpc::Channel>& channel,
                       const std::map<std::string, std::string>& metadata)
    : stub_(channel) {
  for (const auto& [key, value] : metadata) {
    context_.AddMetadata(key, value);
  }
  stub_.PrepareBidiStreamingCall(&context_, kScoreStreamMethod, grpc::StubOptions(), this);
  AddHold();  // writes come from the test's thread
  StartCall();
}

TestStream::~TestStream() {
  context_.TryCancel();
  Finish();
}

void TestStream::Send(absl::string_view message) {
  absl::MutexLock lock(&mutex_);
  writes_.emplace_back(message);
  StartNextWrite();
}

void TestStream::CloseWrites() {
  absl::MutexLock lock(&mutex_);
  closes_ = true;
  StartNextWrite();
}

void TestStream::StartNextWrite() {
  if (is_writing_) {
    return;
  }
  if (!writes_.empty()) {
    outgoing_ = BufferOf(writes_.front());
    writes_.pop_front();
    is_writing_ = true;
    StartWrite(&outgoing_);
  } else if (closes_ && !has_closed_) {
    has_closed_ = true;
    StartWritesDone();
  }
}

void TestStream::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  is_writing_ = false;
  if (ok) {
    StartNextWrite();
  }
}

bool TestStream::ReadOne(v1::ScoreResponse& response) {
  {
    absl::MutexLock lock(&mutex_);
    read_done_ = false;
  }
  StartRead(&incoming_);
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&read_done_));
  return read_ok_ && response.ParseFromString(StringOf(incoming_));
}

v1::ScoreResponse TestStream::Read() {
  v1::ScoreResponse response;
  LOGPROBD_CHECK(ReadOne(response), "the stream has ended");
  return response;
}

grpc::Status TestStream::Finish() {
  {
    absl::MutexLock lock(&mutex_);
    if (is_done_) {
      return status_;
    }
  }
  v1::ScoreResponse response;
  while (ReadOne(response)) {
  }
  RemoveHold();
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&is_done_));
  return status_;
}

void TestStream::OnReadDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  read_ok_ = ok;
  read_done_ = true;
}

void TestStream::OnDone(const grpc::Status& status) {
  absl::MutexLock lock(&mutex_);
  status_ = status;
  is_done_ = true;
}

}  // namespace logprobd::testing
