// Measures how many bytes of hidden states per second reach an engine that only reads them, and the
// CPU time of server and client per GB. This null engine returns a checksum of every row, which is
// compared with that of the row that was sent. The load comes from the load generator of logprobctl
// bench.
//
// The baseline is a bare gRPC server that copies each message to contiguous memory. Both servers
// run in their own processes, receive messages of the same size over the same number of
// connections, and take turns. Clients either send the same rows in every message or write new rows
// for each message. Rows in memory shared with the server are compared with threads that only write
// rows to the heap.
//
//   transport_load_bench [--out FILE] [--commit ID] [--rounds 5] [--seconds 1] [--channels 4,8,16]

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <ctime>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cli/bench/load_generator.h"
#include "server/base/client_memory.h"
#include "server/base/clock.h"
#include "server/base/errors.h"
#include "server/metrics/metrics.h"
#include "server/transport/grpc_server.h"
#include "tests/bench/bench_record.h"
#include "tests/bench/bench_servers.h"
#include "tests/bench/row_checksum.h"

namespace logprobd::testing {
namespace {

using client::LoadPlan;
using client::RowPool;

constexpr int64_t kHidden = 4'096;
constexpr int64_t kRowBytes = kHidden * 2;
constexpr int64_t kMessageRows = 1'020;  // just below 8 MiB with targets and lengths
constexpr int kMessagesPerChannel = 2;   // in flight
constexpr int kWriters = 4;
constexpr int kSharedInFlight = 16;
constexpr double kTargetOfSink = 0.9;
constexpr double kTargetShared = 20;  // GB/s

struct Flags {
  BenchFlags common;
  double seconds = 1;
  std::vector<int> channels = {4, 8, 16};
  std::string serve;
};

/// Sends only the bytes of the rows, to a bare gRPC server.
class BareGrpcTarget final : public client::LoadTarget {
 public:
  BareGrpcTarget(const std::string& address, int channels) {
    for (int i = 0; i < channels; ++i) {
      grpc::ChannelArguments args;
      args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      args.SetInt("logprobd.channel", i);
      args.SetMaxSendMessageSize(-1);
      channels_.push_back(
          grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args));
    }
  }

  void Send(const client::ScoreArgs& args, client::ScoreCallback done) override {
    auto* call = new Call{.rows = args.rows, .done = std::move(done)};
    const grpc::Slice slice(args.hidden.data(), args.hidden.size(), grpc::Slice::STATIC_SLICE);
    call->request = grpc::ByteBuffer(&slice, 1);
    grpc::GenericStub(channels_[next_++ % channels_.size()])
        .UnaryCall(&call->context, "/sink/Take", grpc::StubOptions(), &call->request,
                   &call->response, [call](const grpc::Status& status) {
                     const std::unique_ptr<Call> owned(call);
                     if (!status.ok()) {
                       std::move(owned->done)(absl::UnavailableError(status.error_message()));
                       return;
                     }
                     client::ScoreResult result;
                     result.rows = owned->rows;
                     std::move(owned->done)(std::move(result));
                   });
  }

 private:
  struct Call {
    int64_t rows = 0;
    client::ScoreCallback done;
    grpc::ClientContext context = {};
    grpc::ByteBuffer request = {};
    grpc::ByteBuffer response = {};
  };

  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  std::atomic<size_t> next_ = 0;
};

/// Discards the rows, so that only the threads that write them are measured.
class NoTarget final : public client::LoadTarget {
 public:
  void Send(const client::ScoreArgs& args, client::ScoreCallback done) override {
    client::ScoreResult result;
    result.rows = args.rows;
    std::move(done)(std::move(result));
  }
};

/// The rows of all messages, with the checksum that an engine must return for each row.
struct Rows {
  RowPool pool;
  std::vector<float> checksums;  ///< [pool.distinct_rows()]

  static absl::StatusOr<Rows> Create() {
    client::Head head;
    head.hidden_size = kHidden;
    head.vocab_size = 151'936;
    LOGPROBD_ASSIGN_OR_RETURN(RowPool pool,
                              RowPool::Create(head, client::Dtype::kBf16, kMessageRows, 1));
    Rows rows = {.pool = std::move(pool), .checksums = {}};
    for (int64_t row = 0; row < rows.pool.distinct_rows(); ++row) {
      rows.checksums.push_back(
          RowChecksum(rows.pool.hidden().subspan(static_cast<size_t>(row * kRowBytes), kRowBytes)));
    }
    return rows;
  }
};

double ClientCpuSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

/// Reads the CPU times at the start and the end of the measurement, and checks the checksums in
/// results that have scores.
class RoundObserver final : public client::LoadObserver {
 public:
  RoundObserver(const ServerChild& server, const Rows& rows) : server_(server), rows_(rows) {}

  void MeasureBegins() override { AddCpuSeconds(-1); }
  void MeasureEnds() override { AddCpuSeconds(1); }

  void Answered(int64_t first, int64_t num_rows, const client::ScoreResult& result) override {
    for (int64_t row = 0; !result.logprob.empty() && row < num_rows; ++row) {
      const auto pool_row = static_cast<size_t>((first + row) % rows_.pool.distinct_rows());
      if (result.logprob[static_cast<size_t>(row)] == rows_.checksums[pool_row]) continue;
      absl::MutexLock lock(&mutex_);
      failure_.Update(
          absl::DataLossError("the checksum of a row differs from that of the row that was sent"));
      return;
    }
  }

  double server_cpu() const { return server_cpu_; }
  double client_cpu() const { return client_cpu_; }
  absl::Status failure() const {
    absl::MutexLock lock(&mutex_);
    return failure_;
  }

 private:
  void AddCpuSeconds(double sign) {
    server_cpu_ += sign * server_.CpuSeconds();
    client_cpu_ += sign * ClientCpuSeconds();
  }

  const ServerChild& server_;
  const Rows& rows_;
  double server_cpu_ = 0;
  double client_cpu_ = 0;
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

/// A target and its load, measured round by round.
struct Contender {
  client::LoadTarget* target = nullptr;
  client::Client* sharing = nullptr;    ///< Client whose memory holds fresh rows, or the heap.
  const ServerChild* server = nullptr;  ///< Process whose CPU time is measured.
  LoadPlan plan;
  std::vector<double> rates = {};       ///< GB/s of each round; 1 GB is 1e9 bytes.
  std::vector<double> server_cpu = {};  ///< Seconds per GB.
  std::vector<double> client_cpu = {};  ///< Seconds per GB.

  absl::Status RunRound(const Rows& rows) {
    RoundObserver observer(*server, rows);
    const auto allocate = [this](int64_t bytes) {
      return sharing == nullptr ? client::AllocateHeapRows(bytes) : sharing->AllocateRows(bytes);
    };
    const client::ScoreArgs request;
    const client::LoadFixture fixture = {.target = *target,
                                         .pool = rows.pool,
                                         .request = request,
                                         .allocate = allocate,
                                         .observer = observer};
    LOGPROBD_ASSIGN_OR_RETURN(const client::LoadMeasurement measurement,
                              client::RunLoad(fixture, plan));
    LOGPROBD_RETURN_IF_ERROR(measurement.measured.first_error);
    LOGPROBD_RETURN_IF_ERROR(observer.failure());
    double total_rows = 0;  // includes the window that does not count for the rate
    for (const client::WindowFigures& window : measurement.windows) {
      total_rows += window.rows_per_second * window.seconds;
    }
    const double gigabytes = total_rows * kRowBytes * 1e-9;
    if (gigabytes == 0) return absl::DeadlineExceededError("no message was answered in time");
    const client::Interval& measured = measurement.measured;
    rates.push_back(measured.PerSecond(measured.Total().rows) * kRowBytes * 1e-9);
    server_cpu.push_back(observer.server_cpu() / gigabytes);
    client_cpu.push_back(observer.client_cpu() / gigabytes);
    return absl::OkStatus();
  }
};

/// Returns the plan of a closed loop whose first quarter does not count. The loop runs for all four
/// windows, because windows never lie within a billionth of their mean, and the last three windows
/// are the result.
LoadPlan PlanOf(double seconds, int in_flight, int writers, bool fresh) {
  LoadPlan plan;
  plan.mix = {.sizes = {{.rows = kMessageRows}}};
  plan.concurrency = in_flight;
  plan.writers = writers;
  plan.fresh = fresh;
  plan.window = absl::Seconds(seconds / 3);
  plan.windows_max = 4;
  plan.stability.share = 1e-9;
  return plan;
}

/// Adds the figures of the service, with those of the sink as the baseline. `target_ratio` is the
/// minimum ratio of the speeds, or 0 if there is no target.
void AddRecords(const std::string& what, const Contender& service, const Contender& sink,
                double target_ratio, std::vector<BenchRecord>& records) {
  BenchRecord speed = RecordOf(what, "GB/s", service.rates);
  speed.note = absl::StrFormat(
      "messages of 8 MiB, %d in flight; client's CPU %.3f s/GB, of the sink's client %.3f",
      service.plan.concurrency, Median(service.client_cpu), Median(sink.client_cpu));
  if (target_ratio > 0) absl::StrAppend(&speed.note, "; target at least ", target_ratio);
  BenchRecord cost = RecordOf(what + ", server's CPU", "s/GB", service.server_cpu);
  for (BenchRecord* record : {&speed, &cost}) record->baseline_what = "bare gRPC sink that copies";
  speed.baseline_figure = Median(sink.rates);
  cost.baseline_figure = Median(sink.server_cpu);
  records.push_back(std::move(speed));
  records.push_back(std::move(cost));
}

/// Runs the rounds. The order of the contenders reverses from one round to the next.
absl::Status RunRounds(int rounds, const Rows& rows, std::vector<Contender*> contenders) {
  for (int round = 0; round < rounds; ++round) {
    for (Contender* contender : contenders) LOGPROBD_RETURN_IF_ERROR(contender->RunRound(rows));
    std::reverse(contenders.begin(), contenders.end());
  }
  return absl::OkStatus();
}

/// The servers of all contenders and the rows to send.
struct Servers {
  std::unique_ptr<ServerChild> null;
  std::unique_ptr<ServerChild> sink;
  Rows rows;
};

/// Measures TCP with `channels` connections, with the same rows for each message and with new rows.
absl::Status MeasureTcp(const Flags& flags, const Servers& servers, int channels,
                        std::vector<BenchRecord>& records) {
  client::Client::Options options;
  options.address = servers.null->address();
  options.channels = channels;
  options.transport = client::TransportChoice::kTcp;  // the default is shared memory on one host
  LOGPROBD_ASSIGN_OR_RETURN(const auto client, client::Client::Create(options));
  client::ClientTarget service(*client);
  BareGrpcTarget bare(servers.sink->address(), channels);
  const int in_flight = channels * kMessagesPerChannel;
  Contender same = {.target = &service,
                    .server = servers.null.get(),
                    .plan = PlanOf(flags.seconds, in_flight, 1, /*fresh=*/false)};
  Contender fresh = {.target = &service,
                     .sharing = client.get(),
                     .server = servers.null.get(),
                     .plan = PlanOf(flags.seconds, in_flight, kWriters, /*fresh=*/true)};
  Contender sink = {.target = &bare,
                    .server = servers.sink.get(),
                    .plan = PlanOf(flags.seconds, in_flight, 1, /*fresh=*/false)};
  LOGPROBD_RETURN_IF_ERROR(RunRounds(flags.common.rounds, servers.rows, {&same, &fresh, &sink}));
  const std::string what =
      absl::StrCat("Null engine that reads every byte, TCP, ", channels, " connections");
  AddRecords(what, same, sink, kTargetOfSink, records);
  AddRecords(absl::StrCat(what, ", fresh rows by ", kWriters, " threads"), fresh, sink, 0, records);
  return absl::OkStatus();
}

/// Measures new rows in memory shared with the server.
absl::Status MeasureSharedMemory(const Flags& flags, const Servers& servers,
                                 std::vector<BenchRecord>& records) {
  client::Client::Options options;
  options.address = servers.null->address();
  options.transport = client::TransportChoice::kSharedMemory;
  LOGPROBD_ASSIGN_OR_RETURN(const auto client, client::Client::Create(options));
  client::ClientTarget service(*client);
  NoTarget nowhere;
  Contender shared = {.target = &service,
                      .sharing = client.get(),
                      .server = servers.null.get(),
                      .plan = PlanOf(flags.seconds, kSharedInFlight, kWriters, /*fresh=*/true)};
  Contender copy = {.target = &nowhere,
                    .server = servers.null.get(),
                    .plan = PlanOf(flags.seconds, kSharedInFlight, kWriters, /*fresh=*/true)};
  LOGPROBD_RETURN_IF_ERROR(RunRounds(flags.common.rounds, servers.rows, {&shared, &copy}));
  const std::string what = absl::StrCat(
      "Null engine that reads every byte, shared memory, fresh rows by ", kWriters, " threads");
  BenchRecord speed = RecordOf(what, "GB/s", shared.rates);
  speed.note = absl::StrFormat(
      "messages of 8 MiB, %d in flight; client's CPU %.3f s/GB; %d threads that only write the "
      "rows: %.1f GB/s, %.3f s/GB; target at least %.0f",
      kSharedInFlight, Median(shared.client_cpu), kWriters, Median(copy.rates),
      Median(copy.client_cpu), kTargetShared);
  records.push_back(std::move(speed));
  records.push_back(RecordOf(what + ", server's CPU", "s/GB", shared.server_cpu));
  return absl::OkStatus();
}

/// Makes the null engine read shared memory in place, like a GPU that has pinned it.
class ReadInPlace final : public HostPinning {
 public:
  absl::Status Pin(absl::Span<std::byte> /*memory*/) override { return absl::OkStatus(); }
  void Unpin(absl::Span<std::byte> /*memory*/) override {}
  bool pins() const override { return true; }
};

/// Serves the null head or the sink. The child process runs this function.
absl::Status Serve(const std::string& kind) {
  if (kind == "sink") {
    const EchoServer server(/*copies=*/true);
    ServeUntilClosed(server.address());
    return absl::OkStatus();
  }
  Metrics metrics({.heads = {"null"}, .version = "bench", .commit = ""});
  ReadInPlace pinning;
  LOGPROBD_ASSIGN_OR_RETURN(std::shared_ptr<ServedHead> head,
                            MakeNullHead(Clock::Steady(), metrics, {.reads = true}));
  const OneHead heads(head);
  GrpcServer::Options options;
  options.listen = "127.0.0.1:0";
  options.pinning = &pinning;
  options.unix_socket = absl::StrCat("/tmp/transport_load_bench.", getpid(), ".sock");
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<GrpcServer> server,
                            GrpcServer::Create(options, heads, metrics, Clock::Steady()));
  server->SetServing(true);
  ServeUntilClosed(absl::StrCat("127.0.0.1:", server->port()));
  server->Shutdown(absl::Seconds(5));
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags) {
  LOGPROBD_ASSIGN_OR_RETURN(Rows rows, Rows::Create());
  Servers servers = {.null = nullptr, .sink = nullptr, .rows = std::move(rows)};
  LOGPROBD_ASSIGN_OR_RETURN(servers.null, ServerChild::Start("null"));
  LOGPROBD_ASSIGN_OR_RETURN(servers.sink, ServerChild::Start("sink"));
  std::vector<BenchRecord> records;
  for (const int channels : flags.channels) {
    LOGPROBD_RETURN_IF_ERROR(MeasureTcp(flags, servers, channels, records));
  }
  LOGPROBD_RETURN_IF_ERROR(MeasureSharedMemory(flags, servers, records));
  std::cout << MachineName() << "\n\n";
  PrintRecords(records);
  return WriteRecords(flags.common, MachineName(), records);
}

}  // namespace
}  // namespace logprobd::testing

int main(int argc, char** argv) {
  // Abseil's deadlock detection takes a process-wide lock for every lock; see server/main.cc.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  logprobd::testing::Flags flags;
  CLI::App app(
      "Measures the throughput to an engine that only reads rows, and to a bare gRPC server.");
  logprobd::testing::AddBenchFlags(app, flags.common);
  app.add_option("--seconds", flags.seconds, "Measured seconds per round")->capture_default_str();
  app.add_option("--channels", flags.channels, "Numbers of connections, for example 4,8,16")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--serve", flags.serve, "Only serve: null or sink")->group("");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status =
      flags.serve.empty() ? logprobd::testing::Run(flags) : logprobd::testing::Serve(flags.serve);
  return logprobd::testing::ExitCode("transport_load_bench", status);
}
