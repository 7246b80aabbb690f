#include "client/cli/bench/bench_options.h"

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace logprobd::client {
namespace {

constexpr char kHelp[] =
    "Sends random rows of the head's hidden size and reports latency and throughput. GB/s counts "
    "the bytes of hidden states, 1e9 bytes per GB.\n\n"
    "Load. A closed loop (--concurrency-range) keeps a number of requests in flight and shows how "
    "much the server can do. An open loop (--request-rate) sends whether or not earlier requests "
    "were answered, as many independent clients do. It measures latency from the planned time, so "
    "that queueing is visible, and reports requests that the generator sent late. --rows takes "
    "sizes, with one load each, or a mix with weights: 1:80,256:15,8192:5 sends 80 % single rows "
    "and reports all requests together and by size.\n\n"
    "Length. Without --duration and --requests, windows are measured until throughput and median "
    "latency of the last three lie within --stability percent of their mean; the result is these "
    "three windows. Latencies are kept in full histograms (accurate to 0.8 %).\n\n"
    "Verification. --verify asks the server to compare its engine with double precision before and "
    "after the loads, and compares every answer bit by bit with the first answer to the same "
    "row.\n\n"
    "Examples:\n"
    "  logprobctl bench\n"
    "  logprobctl bench --rows 1 --concurrency-range 1:16:5 --requests 2000\n"
    "  logprobctl bench --rows 1:80,256:15,8192:5 --request-rate 100,200,400 --export b.json\n"
    "  logprobctl bench --rows 8192 --fresh --concurrency-range 4 --export b.json\n"
    "  logprobctl bench --rows 8192 --fresh --transport shm\n"
    "  logprobctl bench --metrics 127.0.0.1:9470 --verify --export b.json";

template <typename Parse, typename Value>
CLI::Option* AddParsed(CLI::App& command, const std::string& name, Parse parse, Value& value,
                       const std::string& description) {
  return command.add_option_function<std::string>(
      name,
      [parse, name, &value](const std::string& text) {
        auto parsed = parse(text);
        if (!parsed.ok()) throw CLI::ValidationError(name, std::string(parsed.status().message()));
        value = *std::move(parsed);
      },
      description);
}

void AddLoadOptions(CLI::App& command, BenchOptions& options) {
  command.option_defaults()->group("Load")->always_capture_default();
  AddParsed(command, "--rows", ParseRows, options.rows,
            "Rows per request: sizes with one load each (1,256,8192), or one mix of rows:weight "
            "(1:80,256:15,8192:5)")
      ->type_name("ROWS")
      ->default_str("256");
  AddParsed(command, "--concurrency-range", ParseRange, options.concurrency,
            "Number of requests that the closed loop keeps in flight; start:end:step runs one load "
            "for each number")
      ->type_name("RANGE")
      ->default_str("1");
  CLI::Option* rate = command
                          .add_option("--request-rate", options.request_rates,
                                      "Requests per second of an open loop, which replaces the "
                                      "closed loop; 100,200 runs one load for each rate")
                          ->delimiter(',')
                          ->allow_extra_args(false)
                          ->check(CLI::PositiveNumber)
                          ->default_str("");
  command
      .add_option_function<std::string>(
          "--arrivals",
          [&options](const std::string& name) {
            options.plan.arrivals = name == "fixed" ? Arrivals::kFixed : Arrivals::kPoisson;
          },
          "Arrival times of the open loop: poisson (random) or fixed (even)")
      ->check(CLI::IsMember({"poisson", "fixed"}))
      ->default_str("poisson")
      ->needs(rate);
  command
      .add_option(
          "--max-inflight", options.plan.inflight_max,
          "Maximum number of unanswered requests of an open loop; further requests wait, and their "
          "latency includes the wait")
      ->check(CLI::Range(int64_t{1}, int64_t{65'536}));
  command.add_flag(
      "--fresh", options.plan.fresh,
      "Write new rows for each request, as a trainer does, instead of sending the same "
      "bytes");
  command
      .add_option("--writers", options.plan.writers,
                  "Number of threads that write and send rows; 0 means one per core")
      ->check(CLI::Range(0, 64));
  command.add_option("--seed", options.plan.seed, "Seed of rows, sizes and arrival times");
}

void AddLengthOptions(CLI::App& command, BenchOptions& options) {
  command.option_defaults()->group("Length")->always_capture_default();
  CLI::Option* requests =
      command
          .add_option("--requests", options.plan.requests, "Number of requests to measure per load")
          ->check(CLI::PositiveNumber);
  options.plan.duration = absl::Seconds(1);  // AddDurationOption formats the value for --help
  AddDurationOption(command, "--duration", options.plan.duration, "Time to measure per load");
  options.plan.duration = absl::ZeroDuration();
  command.get_option("--duration")->default_str("until stable")->excludes(requests);
  AddDurationOption(command, "--window", options.plan.window, "Length of a measuring window");
  command
      .add_option("--windows-max", options.plan.windows_max,
                  "Number of windows after which an unstable load ends")
      ->check(CLI::Range(3, 10'000));
  command
      .add_option("--stability", options.stability_percent,
                  "Maximum difference of the last three windows from their mean, in percent")
      ->check(CLI::Range(0.1, 100.0));
  command
      .add_option("--stability-percentile", options.plan.stability.percentile,
                  "Latency percentile that must be stable")
      ->check(CLI::Range(0.0, 99.99));
  command
      .add_option("--warmup", options.plan.warmup_requests,
                  "Number of warm-up requests before each load, sent in a closed loop")
      ->check(CLI::NonNegativeNumber);
}

void AddRequestOptions(CLI::App& command, BenchOptions& options) {
  command.option_defaults()->group("Request")->always_capture_default();
  command.add_option("--dtype", options.dtype, "Type of the hidden states")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}));
  command
      .add_option(
          "--outputs", options.outputs,
          absl::StrCat("Scores to return: any of ", absl::StrJoin(OutputNames(), ", "), ", all"))
      ->delimiter(',')
      ->allow_extra_args(false);
  command.add_option("--top-k", options.top_k, "Number of most likely ids to return per row")
      ->check(CLI::NonNegativeNumber);
  command.add_option("--head", options.head,
                     "Name of the head; optional if the server has only one head");
}

void AddConnectionOptions(CLI::App& command, BenchOptions& options) {
  command.option_defaults()->group("Connection")->always_capture_default();
  AddParsed(
      command, "--transport", ParseTransportChoice, options.client.transport,
      "How rows are sent to a server on this host: auto (the fastest available), tcp, shm, or "
      "cuda-ipc (the rows lie in a GPU's memory). With --fresh, rows are written into memory "
      "that the server reads, if it shares memory")
      ->type_name("auto|tcp|shm|cuda-ipc")
      ->default_str("LOGPROBD_TRANSPORT, else auto");
  command.add_option("--gpu", options.gpu, "GPU that holds the rows for --transport cuda-ipc")
      ->check(CLI::Range(0, 1023));
  command.add_option("--channels", options.client.channels, "Number of connections")
      ->check(CLI::Range(1, 64));
  command
      .add_option(
          "--retries", options.retries,
          "Maximum number of times that a refused request is sent again; 0 counts it as an error")
      ->check(CLI::Range(0, 100));
  AddDurationOption(command, "--busy-poll", options.client.busy_poll,
                    "Time for which a waiting thread polls for its answer before it sleeps (closed "
                    "loop with one thread per request)");
  command.get_option("--busy-poll")->default_str("sleep at once");
}

void AddReportOptions(CLI::App& command, BenchOptions& options) {
  command.option_defaults()->group("Report")->always_capture_default();
  command
      .add_option("--metrics", options.metrics_url,
                  "HTTP address of the server (host:port or a URL); the report then includes its "
                  "metrics for each load")
      ->type_name("URL");
  command.add_flag("--verify", options.verify,
                   "Ask the server to check its engine before and after the loads, and compare all "
                   "answers to the same row with each other");
  command
      .add_option("--export", options.export_paths,
                  "Also write the report as JSON to FILE, which must end in .json; may be repeated")
      ->allow_extra_args(false)
      ->default_str("")
      ->type_name("FILE")
      ->check([](const std::string& path) {
        return absl::EndsWith(path, ".json") ? std::string() : path + " must end in .json";
      });
}

}  // namespace

void AddBenchOptions(CLI::App& command, BenchOptions& options) {
  AddLoadOptions(command, options);
  AddLengthOptions(command, options);
  AddRequestOptions(command, options);
  AddConnectionOptions(command, options);
  AddReportOptions(command, options);
  command.footer(kHelp);
}

std::vector<LoadPlan> MakePlans(const BenchOptions& options) {
  LoadPlan plan = options.plan;
  plan.stability.share = options.stability_percent / 100;
  std::vector<LoadPlan> plans;
  for (const RowMix& mix : options.rows) {
    plan.mix = mix;
    for (const double rate : options.request_rates) {
      plan.request_rate = rate;
      plans.push_back(plan);
    }
    if (!options.request_rates.empty()) continue;
    for (const int64_t concurrency : options.concurrency) {
      plan.concurrency = concurrency;
      plans.push_back(plan);
    }
  }
  return plans;
}

}  // namespace logprobd::client
