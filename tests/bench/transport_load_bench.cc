// How many bytes of hidden states a second reach an engine that only reads them, and what they cost
// the server: a null engine whose answer holds a checksum of every row, which the client compares.
// The baseline is a bare gRPC server that copies each message into one piece of memory. Both run in
// processes of their own, are fed through as many connections with messages of one size, and take
// turns. Clients send the same rows again and again, or write them anew for each message. Rows in
// memory shared with the server stand beside the same threads' copies to ordinary memory.
//
//   transport_load_bench [--out FILE] [--commit ID] [--rounds 5] [--seconds 1] [--channels 4,8,16]

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/base/client_memory.h"
#include "server/base/clock.h"
#include "server/base/errors.h"
#include "server/metrics/metrics.h"
#include "server/transport/grpc_server.h"
#include "tests/bench/bench_flags.h"
#include "tests/bench/bench_record.h"
#include "tests/bench/echo_server.h"
#include "tests/bench/null_head.h"
#include "tests/bench/one_head.h"
#include "tests/bench/server_child.h"
#include "tests/bench/sink_loader.h"
#include "tests/bench/sinks.h"

namespace logprobd::testing {
namespace {

constexpr int kMessagesInFlight = 2;  // for each connection
constexpr int kWriters = 4;
constexpr int kSharedInFlight = 16;
constexpr double kWantedOfSink = 0.9;
constexpr double kWantedShared = 20;  // GB/s

struct Flags {
  std::string out;
  std::string commit = "unknown";
  int rounds = 5;
  double seconds = 1;
  std::vector<int> channels = {4, 8, 16};
  std::string serve;
};

/// One way to a server, measured round by round.
struct Contender {
  std::unique_ptr<Sink> sink;
  const ServerChild* server = nullptr;  ///< Whose CPU time is counted.
  SinkLoad load;
  std::vector<double> rates;  // a round each
  std::vector<double> server_cpu;
  std::vector<double> client_cpu;

  absl::Status RunRound() {
    LOGPROBD_ASSIGN_OR_RETURN(const SinkRate rate, LoadSink(*sink, *server, load));
    rates.push_back(rate.gigabytes_per_second);
    server_cpu.push_back(rate.server_cpu);
    client_cpu.push_back(rate.client_cpu);
    return absl::OkStatus();
  }
};

/// The service's figures, beside the sink's. `wanted_ratio`: of the speeds; 0: none.
void AddRecords(const std::string& what, const Contender& service, const Contender& sink,
                double wanted_ratio, std::vector<BenchRecord>& records) {
  BenchRecord speed = RecordOf(what, "GB/s", service.rates);
  speed.note = absl::StrFormat(
      "messages of 8 MiB, %d at once; client's CPU %.3f s/GB, of the sink's client %.3f",
      service.load.in_flight, Median(service.client_cpu), Median(sink.client_cpu));
  if (wanted_ratio > 0) absl::StrAppend(&speed.note, "; wanted at least ", wanted_ratio);
  BenchRecord cost = RecordOf(what + ", server's CPU", "s/GB", service.server_cpu);
  for (BenchRecord* record : {&speed, &cost}) record->baseline_what = "bare gRPC sink that copies";
  speed.baseline_figure = Median(sink.rates);
  cost.baseline_figure = Median(sink.server_cpu);
  records.push_back(std::move(speed));
  records.push_back(std::move(cost));
}

/// One round of each, in an order that is turned around from round to round.
absl::Status RunRounds(int rounds, std::vector<Contender*> contenders) {
  for (int round = 0; round < rounds; ++round) {
    for (Contender* contender : contenders) LOGPROBD_RETURN_IF_ERROR(contender->RunRound());
    std::reverse(contenders.begin(), contenders.end());
  }
  return absl::OkStatus();
}

/// The servers of all contenders, and rows to send.
struct Servers {
  std::unique_ptr<ServerChild> null;
  std::unique_ptr<ServerChild> sink;
  SinkRows rows;
};

/// Over TCP with so many connections: the same rows again and again, and rows that are written
/// anew.
absl::Status MeasureTcp(const Flags& flags, const Servers& servers, int channels,
                        std::vector<BenchRecord>& records) {
  client::Client::Options options;
  options.address = servers.null->address();
  options.channels = channels;
  options.transport = client::TransportChoice::kTcp;  // else shared memory, on one host
  Contender same;
  Contender fresh;
  Contender sink;
  same.server = fresh.server = servers.null.get();
  sink.server = servers.sink.get();
  for (Contender* contender : {&same, &fresh, &sink}) {
    contender->load.in_flight = channels * kMessagesInFlight;
    contender->load.seconds = flags.seconds;
  }
  fresh.load.senders = kWriters;
  LOGPROBD_ASSIGN_OR_RETURN(same.sink, MakeServiceSink(options, servers.rows));
  LOGPROBD_ASSIGN_OR_RETURN(fresh.sink, MakeWritingSink(options, fresh.load.in_flight));
  sink.sink = MakeBareGrpcSink(servers.sink->address(), channels, servers.rows);
  LOGPROBD_RETURN_IF_ERROR(RunRounds(flags.rounds, {&same, &fresh, &sink}));
  const std::string what =
      absl::StrCat("Null engine that reads every byte, TCP, ", channels, " connections");
  AddRecords(what, same, sink, kWantedOfSink, records);
  AddRecords(absl::StrCat(what, ", fresh rows by ", kWriters, " threads"), fresh, sink, 0, records);
  return absl::OkStatus();
}

/// Rows that are written anew in memory shared with the server.
absl::Status MeasureSharedMemory(const Flags& flags, const Servers& servers,
                                 std::vector<BenchRecord>& records) {
  client::Client::Options options;
  options.address = servers.null->address();
  options.transport = client::TransportChoice::kSharedMemory;
  Contender shared;
  Contender copy;
  for (Contender* contender : {&shared, &copy}) {
    contender->server = servers.null.get();
    contender->load = {.in_flight = kSharedInFlight, .senders = kWriters, .seconds = flags.seconds};
  }
  LOGPROBD_ASSIGN_OR_RETURN(shared.sink, MakeWritingSink(options, kSharedInFlight));
  copy.sink = MakeCopySink(kSharedInFlight);
  LOGPROBD_RETURN_IF_ERROR(RunRounds(flags.rounds, {&shared, &copy}));
  const std::string what = absl::StrCat(
      "Null engine that reads every byte, shared memory, fresh rows by ", kWriters, " threads");
  BenchRecord speed = RecordOf(what, "GB/s", shared.rates);
  speed.note = absl::StrFormat(
      "messages of 8 MiB, %d at once; client's CPU %.3f s/GB; %d threads that only write the rows: "
      "%.1f GB/s, %.3f s/GB; wanted at least %.0f",
      kSharedInFlight, Median(shared.client_cpu), kWriters, Median(copy.rates),
      Median(copy.client_cpu), kWantedShared);
  records.push_back(std::move(speed));
  records.push_back(RecordOf(what + ", server's CPU", "s/GB", shared.server_cpu));
  return absl::OkStatus();
}

/// The null engine reads shared memory where it lies, as a GPU does once it is pinned.
class ReadInPlace final : public HostPinning {
 public:
  absl::Status Pin(absl::Span<std::byte> /*memory*/) override { return absl::OkStatus(); }
  void Unpin(absl::Span<std::byte> /*memory*/) override {}
  bool pins() const override { return true; }
};

/// The child's side.
int Serve(const std::string& kind) {
  if (kind == "sink") {
    const EchoServer server(/*copies=*/true);
    ServeUntilClosed(server.address());
    return 0;
  }
  Metrics metrics({.heads = {"null"}, .version = "bench", .commit = ""});
  ReadInPlace pinning;
  absl::StatusOr<std::shared_ptr<ServedHead>> head =
      MakeNullHead(Clock::Steady(), metrics, {.reads = true});
  if (!head.ok()) {
    std::cerr << head.status() << '\n';
    return 1;
  }
  const OneHead heads(*head);
  GrpcServer::Options options;
  options.listen = "127.0.0.1:0";
  options.pinning = &pinning;
  options.unix_socket = absl::StrCat("/tmp/transport_load_bench.", getpid(), ".sock");
  absl::StatusOr<std::unique_ptr<GrpcServer>> server =
      GrpcServer::Create(options, heads, metrics, Clock::Steady());
  if (!server.ok()) {
    std::cerr << server.status() << '\n';
    return 1;
  }
  (*server)->SetServing(true);
  ServeUntilClosed(absl::StrCat("127.0.0.1:", (*server)->port()));
  (*server)->Shutdown(absl::Seconds(5));
  return 0;
}

absl::Status Run(const Flags& flags) {
  std::vector<BenchRecord> records;
  Servers servers;
  LOGPROBD_ASSIGN_OR_RETURN(servers.null, ServerChild::Start("null"));
  LOGPROBD_ASSIGN_OR_RETURN(servers.sink, ServerChild::Start("sink"));
  for (const int channels : flags.channels) {
    LOGPROBD_RETURN_IF_ERROR(MeasureTcp(flags, servers, channels, records));
  }
  LOGPROBD_RETURN_IF_ERROR(MeasureSharedMemory(flags, servers, records));
  std::cout << MachineName() << "\n\n";
  for (const BenchRecord& record : records) {
    std::cout << absl::StrFormat("%-86s %7.3f %-5s (%.3f to %.3f)", record.what, record.figure,
                                 record.unit, record.spread.first, record.spread.second);
    if (record.baseline_figure.has_value()) {
      std::cout << absl::StrFormat("  %.2f of %.3f", record.figure / *record.baseline_figure,
                                   *record.baseline_figure);
    }
    std::cout << '\n';
  }
  if (flags.out.empty()) return absl::OkStatus();
  return WriteRecords(flags.out, {.machine = MachineName(), .commit = flags.commit}, records);
}

}  // namespace
}  // namespace logprobd::testing

int main(int argc, char** argv) {
  // As in the programs: see server/main.cc.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  logprobd::testing::Flags flags;
  CLI::App app("Bytes a second to an engine that only reads them, against a bare gRPC server.");
  logprobd::testing::AddBenchFlags(app, flags.out, flags.commit, flags.rounds);
  app.add_option("--seconds", flags.seconds, "Measured in a round")->capture_default_str();
  app.add_option("--channels", flags.channels, "Connections; several: 4,8,16")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--serve", flags.serve, "Serve and do nothing else: null or sink")->group("");
  CLI11_PARSE(app, argc, argv);
  if (!flags.serve.empty()) return logprobd::testing::Serve(flags.serve);
  const absl::Status status = logprobd::testing::Run(flags);
  if (!status.ok()) std::cerr << "transport_load_bench: " << status << '\n';
  return status.ok() ? 0 : 1;
}
