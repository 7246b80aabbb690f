#include "tests/bench/sinks.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <random>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/check.h"
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

/// The same with rows that are copied to the message's own memory first, of two kinds in turn.
class WritingSink final : public Sink {
 public:
  static absl::StatusOr<std::unique_ptr<WritingSink>> Create(std::unique_ptr<client::Client> client,
                                                             int in_flight,
                                                             const MakeMemory& memory) {
    auto sink = std::make_unique<WritingSink>();
    for (int i = 0; i < in_flight; ++i) {
      LOGPROBD_ASSIGN_OR_RETURN(const absl::Span<std::byte> slot,
                                memory ? memory(kSinkHiddenBytes) : sink->HeapMemory());
      sink->free_.push_back(slot);
    }
    sink->client_ = std::move(client);
    return sink;
  }

  void Send(Sent sent) override {
    absl::Span<std::byte> slot;
    const SinkRows* rows = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      LOGPROBD_CHECK(!free_.empty(), "more messages are sent at once than was said");
      slot = free_.back();
      free_.pop_back();
      rows = &rows_[num_sent_++ % 2];
    }
    std::copy(rows->hidden.begin(), rows->hidden.end(), slot.begin());
    client_->ScoreAsync(ArgsOf(slot, *rows),
                        [this, slot, rows, sent = std::move(sent)](
                            const absl::StatusOr<client::ScoreResult>& result) {
                          {
                            absl::MutexLock lock(&mutex_);
                            free_.push_back(slot);
                          }
                          sent(Check(result, *rows));
                        });
  }

 private:
  absl::StatusOr<absl::Span<std::byte>> HeapMemory() {
    heap_.emplace_back(static_cast<size_t>(kSinkHiddenBytes));
    return absl::MakeSpan(heap_.back());
  }

  const std::array<SinkRows, 2> rows_ = {SinkRows(1), SinkRows(2)};
  std::deque<std::vector<std::byte>> heap_;
  absl::Mutex mutex_;
  std::vector<absl::Span<std::byte>> free_ ABSL_GUARDED_BY(mutex_);
  int64_t num_sent_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<client::Client> client_;  // ends what is under way before the rest goes
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
                                                      int in_flight, const MakeMemory& memory) {
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<client::Client> client,
                            client::Client::Create(options));
  return WritingSink::Create(std::move(client), in_flight, memory);
}

std::unique_ptr<Sink> MakeBareGrpcSink(const std::string& address, int channels,
                                       const SinkRows& rows) {
  return std::make_unique<BareGrpcSink>(address, channels, rows);
}

}  // namespace logprobd::testing
