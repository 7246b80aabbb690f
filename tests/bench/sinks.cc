#include "tests/bench/sinks.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <random>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/errors.h"
#include "tests/bench/row_checksum.h"

namespace logprobd::testing {
namespace {

client::ScoreArgs ArgsOf(absl::Span<const std::byte> hidden, const SinkRows& rows) {
  client::ScoreArgs args;
  args.hidden = hidden;
  args.rows = kSinkRows;
  args.hidden_size = kSinkHidden;
  args.targets = rows.targets;
  return args;
}

/// Whether the answer proves that these rows were read.
absl::Status Check(const absl::StatusOr<client::ScoreResult>& result, const SinkRows& rows) {
  if (!result.ok()) return result.status();
  if (result->logprob == rows.checksums) return absl::OkStatus();
  return absl::DataLossError("a row's checksum is not what was sent");
}

/// The service, through this project's client.
class ServiceSink final : public Sink {
 public:
  ServiceSink(std::unique_ptr<client::Client> client, const SinkRows& rows)
      : rows_(rows), client_(std::move(client)) {}

  void Send(Sent sent) override {
    client_->ScoreAsync(
        ArgsOf(rows_.hidden, rows_),
        [this, sent = std::move(sent)](const absl::StatusOr<client::ScoreResult>& result) {
          sent(Check(result, rows_));
        });
  }

 private:
  const SinkRows& rows_;
  const std::unique_ptr<client::Client> client_;
};

/// Memory of messages in flight, and what is written there: rows of two kinds in turn. Thread-safe.
class FreshRows {
 public:
  struct Message {
    absl::Span<std::byte> hidden;
    const SinkRows* rows;
  };

  void AddMemory(client::RowBuffer memory) {
    free_.push_back(memory.bytes());
    memory_.push_back(std::move(memory));
  }

  /// Written by the caller's thread.
  Message Write() {
    Message message = Take();
    std::copy(message.rows->hidden.begin(), message.rows->hidden.end(), message.hidden.begin());
    return message;
  }

  void Give(const Message& message) {
    absl::MutexLock lock(&mutex_);
    free_.push_back(message.hidden);
  }

 private:
  Message Take() {
    absl::MutexLock lock(&mutex_);
    LOGPROBD_CHECK(!free_.empty(), "more messages are sent at once than was said");
    const absl::Span<std::byte> hidden = free_.back();
    free_.pop_back();
    return {hidden, &rows_[num_taken_++ % rows_.size()]};
  }

  const std::array<SinkRows, 2> rows_ = {SinkRows(1), SinkRows(2)};
  std::vector<client::RowBuffer> memory_;
  absl::Mutex mutex_;
  std::vector<absl::Span<std::byte>> free_ ABSL_GUARDED_BY(mutex_);
  size_t num_taken_ ABSL_GUARDED_BY(mutex_) = 0;
};

/// The service, with rows that are written first.
class WritingSink final : public Sink {
 public:
  explicit WritingSink(std::unique_ptr<client::Client> client) : client_(std::move(client)) {}

  absl::Status Allocate(int in_flight) {
    for (int i = 0; i < in_flight; ++i) {
      LOGPROBD_ASSIGN_OR_RETURN(client::RowBuffer memory, client_->AllocateRows(kSinkHiddenBytes));
      fresh_.AddMemory(std::move(memory));
    }
    return absl::OkStatus();
  }

  void Send(Sent sent) override {
    const FreshRows::Message message = fresh_.Write();
    client_->ScoreAsync(
        ArgsOf(message.hidden, *message.rows),
        [this, message, sent = std::move(sent)](const absl::StatusOr<client::ScoreResult>& result) {
          fresh_.Give(message);
          sent(Check(result, *message.rows));
        });
  }

 private:
  FreshRows fresh_;
  const std::unique_ptr<client::Client> client_;  // ends what is under way before the rest goes
};

/// Rows that are written and go nowhere.
class CopySink final : public Sink {
 public:
  explicit CopySink(int in_flight) {
    const auto size = static_cast<size_t>(kSinkHiddenBytes);
    for (int i = 0; i < in_flight; ++i) {
      const auto memory = std::make_shared<std::vector<std::byte>>(size);
      fresh_.AddMemory({memory, absl::MakeSpan(*memory), /*is_shared=*/false});
    }
  }

  void Send(Sent sent) override {
    fresh_.Give(fresh_.Write());
    sent(absl::OkStatus());
  }

 private:
  FreshRows fresh_;
};

/// A bare gRPC server, called as plainly as can be.
class BareGrpcSink final : public Sink {
 public:
  BareGrpcSink(const std::string& address, int channels, const SinkRows& rows)
      : slice_(rows.hidden.data(), rows.hidden.size(), grpc::Slice::STATIC_SLICE) {
    for (int i = 0; i < channels; ++i) {
      grpc::ChannelArguments args;
      args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      args.SetInt("logprobd.channel", i);
      args.SetMaxSendMessageSize(-1);
      channels_.push_back(
          grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args));
    }
  }

  void Send(Sent sent) override {
    auto* call = new Call;
    call->request = grpc::ByteBuffer(&slice_, 1);
    call->sent = std::move(sent);
    grpc::GenericStub(channels_[next_++ % channels_.size()])
        .UnaryCall(
            &call->context, "/sink/Take", grpc::StubOptions(), &call->request, &call->response,
            [call](const grpc::Status& status) {
              const Sent done = std::move(call->sent);
              delete call;
              done(status.ok() ? absl::OkStatus() : absl::UnavailableError(status.error_message()));
            });
  }

 private:
  struct Call {
    grpc::ClientContext context;
    grpc::ByteBuffer request;
    grpc::ByteBuffer response;
    Sent sent;
  };

  const grpc::Slice slice_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  std::atomic<size_t> next_ = 0;
};

}  // namespace

SinkRows::SinkRows(uint64_t seed)
    : hidden(static_cast<size_t>(kSinkHiddenBytes)), targets(kSinkRows, 0) {
  std::mt19937_64 random(seed);
  for (std::byte& byte : hidden) byte = static_cast<std::byte>(random());
  for (size_t row = 0; row < targets.size(); ++row) {
    checksums.push_back(RowChecksum({hidden.data() + row * kSinkRowBytes, kSinkRowBytes}));
  }
}

absl::StatusOr<std::unique_ptr<Sink>> MakeServiceSink(const client::Client::Options& options,
                                                      const SinkRows& rows) {
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<client::Client> client,
                            client::Client::Create(options));
  return std::make_unique<ServiceSink>(std::move(client), rows);
}

absl::StatusOr<std::unique_ptr<Sink>> MakeWritingSink(const client::Client::Options& options,
                                                      int in_flight) {
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<client::Client> client,
                            client::Client::Create(options));
  auto sink = std::make_unique<WritingSink>(std::move(client));
  LOGPROBD_RETURN_IF_ERROR(sink->Allocate(in_flight));
  return sink;
}

std::unique_ptr<Sink> MakeCopySink(int in_flight) { return std::make_unique<CopySink>(in_flight); }

std::unique_ptr<Sink> MakeBareGrpcSink(const std::string& address, int channels,
                                       const SinkRows& rows) {
  return std::make_unique<BareGrpcSink>(address, channels, rows);
}

}  // namespace logprobd::testing
