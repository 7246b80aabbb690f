#include "client/cli/bench/bench_options.h"

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/bench/bench_report.h"
#include "client/cli/output_names.h"

namespace logprobd::client {
namespace {

constexpr char kHelp[] =
    "Sends random rows of the head's hidden size and reports latency and throughput. GB/s counts "
    "hidden states, 1e9 bytes.\n\n"
    "Load. A closed loop (--concurrency-range) keeps a number of requests in flight: it asks how "
    "much the server can do. An open loop (--request-rate) sends whether or not earlier requests "
    "were answered, as many clients together do, and counts latency from the planned time, so that "
    "queueing shows; what the generator sent late is reported. --rows takes sizes, one load each, "
    "or a mix with weights: 1:80,256:15,8192:5 is 80 % single rows, reported together and by "
    "size.\n\n"
    "How long. Unless --duration or --requests says otherwise, windows are measured until "
    "throughput and median latency of the last three lie within --stability percent of their mean; "
    "the result is those three. Latencies are kept in full histograms (0.8 %).\n\n"
    "Right? --verify MODEL_DIR scores a sample of the rows that were sent in double precision from "
    "the model folder, and compares every answer of the run bit by bit with the first to the same "
    "row.\n\n"
    "Examples:\n"
    "  logprobctl bench\n"
    "  logprobctl bench --rows 1 --concurrency-range 1:16:5 --requests 2000\n"
    "  logprobctl bench --rows 1:80,256:15,8192:5 --request-rate 100,200,400 --export b.html\n"
    "  logprobctl bench --rows 8192 --method stream --fresh --concurrency-range 4 --export b.csv\n"
    "  logprobctl bench --rows 8192 --fresh --transport shm\n"
    "  logprobctl bench --metrics 127.0.0.1:9470 --verify /models/Qwen3-8B --export b.json";

template <typename Parse, typename Value>
CLI::Option* AddParsed(CLI::App& command, const std::string& name, Parse parse, Value& value,
                       const std::string& description) {
  return command.add_option_function<std::string>(
      name,
      [parse, name, &value](const std::string& text) {
        auto parsed = parse(text);
        if (!parsed.ok()) {
          throw CLI::ValidationError(name, std::string(parsed.status().message()));
        }
        value = *std::move(parsed);
      },
      description);
}

void AddLoadOptions(CLI::App& command, BenchOptions& options) {
  const std::string group = "Load";
  AddParsed(command, "--rows", ParseRows, options.rows,
            "Rows of a request: sizes, one load each (1,256,8192), or a mix rows:weight "
            "(1:80,256:15,8192:5)")
      ->type_name("ROWS")
      ->default_str("256")
      ->group(group);
  AddParsed(command, "--concurrency-range", ParseRange, options.concurrency,
            "Requests always in flight, start:end:step")
      ->type_name("RANGE")
      ->default_str("1")
      ->group(group);
  CLI::Option* rate =
      command
          .add_option("--request-rate", options.request_rates,
                      "Requests a second (open loop), instead of a concurrency; several: 100,200")
          ->delimiter(',')
          ->allow_extra_args(false)
          ->check(CLI::PositiveNumber)
          ->group(group);
  command
      .add_option_function<std::string>(
          "--arrivals",
          [&options](const std::string& name) {
            options.plan.arrivals = name == "fixed" ? Arrivals::kFixed : Arrivals::kPoisson;
          },
          "When they are due: at random, or evenly")
      ->check(CLI::IsMember({"poisson", "fixed"}))
      ->default_str("poisson")
      ->needs(rate)
      ->group(group);
  command
      .add_option(
          "--max-inflight", options.plan.inflight_max,
          "Most unanswered requests of an open loop; what is due beyond them waits, and its "
          "latency with it")
      ->check(CLI::Range(int64_t{1}, int64_t{65'536}))
      ->capture_default_str()
      ->group(group);
  command
      .add_flag("--fresh", options.plan.fresh,
                "Write the rows of each request anew, as a trainer does, instead of sending the "
                "same bytes")
      ->group(group);
  command
      .add_option("--writers", options.plan.writers,
                  "Threads that write rows and send; 0: one for each core")
      ->check(CLI::Range(0, 64))
      ->capture_default_str()
      ->group(group);
  command.add_option("--seed", options.plan.seed, "Of rows, sizes and arrivals")
      ->capture_default_str()
      ->group(group);
}

void AddLengthOptions(CLI::App& command, BenchOptions& options) {
  const std::string group = "Length";
  CLI::Option* requests =
      command.add_option("--requests", options.plan.requests, "Requests to measure for each load")
          ->check(CLI::PositiveNumber)
          ->group(group);
  options.plan.duration = absl::Seconds(1);  // for the help text alone
  AddDurationOption(command, "--duration", options.plan.duration, "Time to measure for each load");
  options.plan.duration = absl::ZeroDuration();
  command.get_option("--duration")->default_str("until stable")->excludes(requests)->group(group);
  AddDurationOption(command, "--window", options.plan.window, "Length of a window");
  command.get_option("--window")->group(group);
  command
      .add_option("--windows-max", options.plan.windows_max,
                  "Windows after which a load ends that has not become stable")
      ->check(CLI::Range(3, 10'000))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--stability", options.stability_percent,
                  "Percent by which the last three windows may differ from their mean")
      ->check(CLI::Range(0.1, 100.0))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--stability-percentile", options.plan.stability.percentile,
                  "Percentile of latency that has to be stable")
      ->check(CLI::Range(0.0, 99.99))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--warmup", options.plan.warmup_requests,
                  "Requests before measuring each load, in a closed loop")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group(group);
  AddDurationOption(command, "--warmup-time", options.plan.warmup_time,
                    "Time of the load itself before measuring it, after --warmup");
  command.get_option("--warmup-time")->group(group);
}

void AddRequestOptions(CLI::App& command, BenchOptions& options) {
  const std::string group = "Request";
  command.add_option("--dtype", options.dtype, "Type of the hidden states")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--outputs", options.outputs,
                  absl::StrCat("Of ", absl::StrJoin(OutputNames(), ", "), ", all"))
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str()
      ->group(group);
  command.add_option("--top-k", options.top_k, "Best ids to return for each row")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group(group);
  command.add_option("--head", options.head, "Head to load; the only one by default")->group(group);
}

void AddConnectionOptions(CLI::App& command, BenchOptions& options) {
  const std::string group = "Connection";
  command
      .add_option("--method", options.method,
                  "score: unary calls; stream: chunks over ScoreStream, for bulk")
      ->check(CLI::IsMember({"score", "stream"}))
      ->capture_default_str()
      ->group(group);
  AddParsed(command, "--transport", ParseTransportChoice, options.transport,
            "How rows travel to a server on this host: auto (from the heap the shortest way), tcp, "
            "shm, cuda-ipc (rows lie in a GPU's memory). With --fresh rows that can be shared are "
            "written where the server reads them")
      ->type_name("auto|tcp|shm|cuda-ipc")
      ->default_str("LOGPROBD_TRANSPORT, else auto")
      ->group(group);
  command.add_option("--gpu", options.gpu, "GPU of the rows of --transport cuda-ipc")
      ->check(CLI::Range(0, 1023))
      ->capture_default_str()
      ->group(group);
  command.add_option("--channels", options.channels, "Connections")
      ->check(CLI::Range(1, 64))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--retries", options.retries,
                  "Times a refused request is sent again; 0 counts it as an error")
      ->check(CLI::Range(0, 100))
      ->capture_default_str()
      ->group(group);
  AddDurationOption(command, "--busy-poll", options.busy_poll,
                    "Look for an answer so long before the thread that waits for it sleeps (closed "
                    "loop with a thread for each request)");
  command.get_option("--busy-poll")->default_str("it sleeps at once")->group(group);
}

void AddReportOptions(CLI::App& command, BenchOptions& options) {
  const std::string group = "Report";
  command
      .add_option("--percentile", options.percentiles,
                  "Percentiles of latency beside p50, p90, p95, p99 and p99.9; several: 75,99.99")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(0.0, 99.9999))
      ->group(group);
  command
      .add_option("--metrics", options.metrics_url,
                  "The server's HTTP address (host:port or a URL): its metrics before, during and "
                  "after each load join the report")
      ->type_name("URL")
      ->group(group);
  command
      .add_option("--verify", options.verify_folder,
                  "Model folder: compare answers with double precision and with each other")
      ->type_name("MODEL_DIR")
      ->group(group);
  command.add_option("--verify-rows", options.verify_rows, "Rows to compare with double precision")
      ->check(CLI::Range(int64_t{1}, int64_t{4'096}))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--export", options.export_paths,
                  "Also write FILE.csv, FILE.json or FILE.html (a page with plots); repeatable")
      ->allow_extra_args(false)
      ->type_name("FILE")
      ->check([](const std::string& path) {
        return IsExportPath(path) ? std::string() : path + " must end in .csv, .json or .html";
      })
      ->group(group);
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

Client::Options BenchClientOptions(const BenchOptions& options) {
  return {.channels = options.channels,
          .retries = options.retries,
          .bulk_stream = options.method == "stream",
          .busy_poll = options.busy_poll,
          .transport = options.transport};
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
