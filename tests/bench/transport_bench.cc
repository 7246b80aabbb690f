// Measures the cost of a request outside the engine. The server, the batcher and the client run in
// one process and communicate over loopback, and the engine computes nothing.
//
//   transport_bench [--out FILE] [--commit ID] [--rounds 5] [--requests 100000]
//
// Round trips are measured with a synchronous caller that has one request in flight. They alternate
// with plain gRPC calls of the same size to a server that responds at once. Memory is the resident
// set of the process over --requests requests. Throughput is that of one large call, which is split
// into messages of 8 MiB on 4 connections.

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/client.h"
#include "logprobd/v1/scoring.grpc.pb.h"
#include "server/base/clock.h"
#include "server/base/errors.h"
#include "server/metrics/metrics.h"
#include "server/transport/grpc_server.h"
#include "tests/bench/bench_record.h"
#include "tests/bench/bench_servers.h"

namespace logprobd::testing {
namespace {

constexpr int64_t kHidden = 4'096;
constexpr int64_t kRowBytes = kHidden * 2;
constexpr int64_t kRequestsOfRound = 2'000;
constexpr int64_t kWarmUpRequests = 2'000;
constexpr int64_t kLargeRows = 32'768;  // 256 MiB

struct Flags {
  BenchFlags common;
  int64_t requests = 100'000;
};

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void CheckOk(const absl::Status& status) { LOGPROBD_CHECK(status.ok(), status.ToString()); }

/// Percentiles of the round trips of one round, in microseconds.
struct RoundTrip {
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
};

template <typename Call>
RoundTrip TimeRound(int64_t requests, const Call& call) {
  std::vector<double> micros;
  micros.reserve(static_cast<size_t>(requests));
  for (int64_t request = 0; request < requests; ++request) {
    const auto start = std::chrono::steady_clock::now();
    call();
    micros.push_back(SecondsSince(start) * 1e6);
  }
  std::sort(micros.begin(), micros.end());
  return {.p50 = micros[micros.size() / 2],
          .p90 = micros[micros.size() * 9 / 10],
          .p99 = micros[micros.size() * 99 / 100]};
}

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total_pages = 0;
  int64_t resident_pages = 0;
  file >> total_pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

/// Makes calls with the C++ client library, with a generated stub, and with plain gRPC.
class Callers {
 public:
  Callers(const std::string& address, const std::string& echo_address)
      : row_(kRowBytes),
        client_(*client::Client::Create({.address = address})),
        stub_(
            v1::Scoring::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))),
        echo_(grpc::CreateChannel(echo_address, grpc::InsecureChannelCredentials())) {
    args_.hidden = row_;
    args_.rows = 1;
    args_.hidden_size = kHidden;
    args_.targets = targets_;
    request_.set_dtype(v1::DTYPE_BF16);
    request_.set_rows(1);
    request_.set_hidden_size(kHidden);
    request_.set_targets(std::string(4, '\0'));
    request_.set_hidden(std::string(kRowBytes, '\0'));
  }

  client::Client& client() { return *client_; }

  void Library() { CheckOk(client_->Score(args_).status()); }

  void Stub() {
    grpc::ClientContext context;
    v1::ScoreResponse response;
    const grpc::Status status = stub_->Score(&context, request_, &response);
    LOGPROBD_CHECK(status.ok(), status.error_message());
  }

  void Plain() {
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const grpc::Slice slice(row_.data(), row_.size());
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::Status status;
    const auto reader = echo_.PrepareUnaryCall(&context, "/echo/Echo", request, &queue);
    reader->StartCall();
    reader->Finish(&response, &status, nullptr);
    void* tag = nullptr;
    bool is_ok = false;
    LOGPROBD_CHECK(queue.Next(&tag, &is_ok) && is_ok && status.ok(), status.error_message());
  }

 private:
  const std::vector<std::byte> row_;
  const std::vector<int32_t> targets_ = {0};
  client::ScoreArgs args_;
  v1::ScoreRequest request_;
  const std::unique_ptr<client::Client> client_;
  const std::unique_ptr<v1::Scoring::Stub> stub_;
  grpc::GenericStub echo_;
};

std::vector<BenchRecord> MeasureRoundTrips(Callers& callers, const Flags& flags) {
  std::vector<double> library_p50;
  std::vector<double> library_p90;
  std::vector<double> library_p99;
  std::vector<double> stub_p50;
  std::vector<double> plain_p50;
  TimeRound(kWarmUpRequests, [&] { callers.Library(); });
  TimeRound(kWarmUpRequests, [&] { callers.Stub(); });
  TimeRound(kWarmUpRequests, [&] { callers.Plain(); });
  for (int round = 0; round < flags.common.rounds; ++round) {
    plain_p50.push_back(TimeRound(kRequestsOfRound, [&] { callers.Plain(); }).p50);
    stub_p50.push_back(TimeRound(kRequestsOfRound, [&] { callers.Stub(); }).p50);
    const RoundTrip library = TimeRound(kRequestsOfRound, [&] { callers.Library(); });
    library_p50.push_back(library.p50);
    library_p90.push_back(library.p90);
    library_p99.push_back(library.p99);
  }
  const std::string what = "One-row request over loopback, H=4096 bf16, null engine, ";
  std::vector<BenchRecord> records = {RecordOf(what + "generated stub, p50", "us", stub_p50),
                                      RecordOf(what + "C++ client, p50", "us", library_p50),
                                      RecordOf(what + "C++ client, p90", "us", library_p90),
                                      RecordOf(what + "C++ client, p99", "us", library_p99)};
  for (size_t i = 0; i < 2; ++i) {
    records[i].baseline_what = "plain gRPC call of 8 KiB, p50";
    records[i].baseline_figure = Median(plain_p50);
  }
  return records;
}

BenchRecord MeasureMemory(Callers& callers, const Flags& flags) {
  constexpr int64_t kSamples = 20;
  const int64_t requests_of_sample = std::max<int64_t>(1, flags.requests / kSamples);
  std::vector<double> resident_mib;
  for (int64_t sample = 0; sample < kSamples; ++sample) {
    for (int64_t request = 0; request < requests_of_sample; ++request) callers.Stub();
    resident_mib.push_back(static_cast<double>(ResidentBytes()) / (1 << 20));
  }
  BenchRecord record = RecordOf(
      absl::StrCat("Resident memory over ", requests_of_sample * kSamples, " one-row requests"),
      "MiB", resident_mib);
  record.rounds = static_cast<int>(kSamples);
  record.note =
      absl::StrFormat("server and client in one process; first sample %.1f, last %.1f MiB",
                      resident_mib.front(), resident_mib.back());
  return record;
}

BenchRecord MeasureThroughput(Callers& callers, const Flags& flags) {
  const std::vector<std::byte> hidden(static_cast<size_t>(kLargeRows * kRowBytes), std::byte{1});
  const std::vector<int32_t> targets(kLargeRows, 0);
  client::ScoreArgs args;
  args.hidden = hidden;
  args.rows = kLargeRows;
  args.hidden_size = kHidden;
  args.targets = targets;
  std::vector<double> gigabytes_per_second;
  CheckOk(callers.client().Score(args).status());
  for (int round = 0; round < flags.common.rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    CheckOk(callers.client().Score(args).status());
    gigabytes_per_second.push_back(static_cast<double>(hidden.size()) / SecondsSince(start) / 1e9);
  }
  BenchRecord record =
      RecordOf("Throughput over loopback, 8 MiB messages, 4 connections, null engine", "GB/s",
               gigabytes_per_second);
  record.note = "higher is better; client, kernel and server share the cores";
  return record;
}

absl::Status Run(const Flags& flags) {
  Metrics metrics({.heads = {"null"}, .version = "bench", .commit = flags.common.commit});
  absl::StatusOr<std::shared_ptr<ServedHead>> head = MakeNullHead(Clock::Steady(), metrics);
  CheckOk(head.status());
  const OneHead heads(*head);
  GrpcServer::Options options;
  options.listen = "127.0.0.1:0";
  absl::StatusOr<std::unique_ptr<GrpcServer>> server =
      GrpcServer::Create(options, heads, metrics, Clock::Steady());
  CheckOk(server.status());
  (*server)->SetServing(true);
  const EchoServer echo;

  std::vector<BenchRecord> records;
  {
    Callers callers(absl::StrCat("127.0.0.1:", (*server)->port()), echo.address());
    records = MeasureRoundTrips(callers, flags);
    records.push_back(MeasureMemory(callers, flags));
    records.push_back(MeasureThroughput(callers, flags));
  }
  (*server)->Shutdown(absl::Seconds(5));

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
  CLI::App app("Measures the cost of a request outside the engine, over loopback.");
  logprobd::testing::AddBenchFlags(app, flags.common);
  app.add_option("--requests", flags.requests, "Number of requests over which memory is measured")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return logprobd::testing::ExitCode("transport_bench", logprobd::testing::Run(flags));
}
