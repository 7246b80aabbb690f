#include "client/cli/bench/bench_report.h"

#include <sched.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cli/command.h"
#include "client/cli/terminal.h"

namespace logprobd::client {
namespace {

using Json = nlohmann::ordered_json;

/// Returns the measurements of a load, or of the request size `index` of its mix, whose requests
/// `stats` counts.
Json StatsJson(const BenchReport& report, const BenchLoad& load, const SizeStats& stats,
               std::optional<size_t> index = std::nullopt) {
  const LoadPlan& plan = load.plan;
  const LateSends& late = load.measurement.measured.late;
  const double rows_per_second = load.measurement.measured.PerSecond(stats.rows);
  const auto if_open_loop = [&plan](auto value) {
    return plan.is_open_loop() ? Json(value) : Json(nullptr);
  };
  // If all requests have the same size, "rows" is a number instead of text.
  if (plan.mix.sizes.size() == 1) index = 0;
  Json json = {
      {"rows", index.has_value() ? Json(plan.mix.sizes[*index].rows) : Json(plan.mix.Text())},
      {"concurrency", plan.is_open_loop() ? Json(nullptr) : Json(plan.concurrency)},
      {"request_rate", if_open_loop(plan.request_rate)},
      {"arrivals", if_open_loop(plan.arrivals == Arrivals::kPoisson ? "poisson" : "fixed")},
      {"requests", stats.requests()},
      {"errors", stats.errors},
      {"seconds", load.measurement.measured.seconds},
      {"rows_per_second", rows_per_second},
      {"gigabytes_per_second", report.gigabytes_per_second(rows_per_second)},
      {"latency_mean_seconds", stats.latency.mean()}};
  for (const double percentile : kPercentiles) {
    json[absl::StrCat("latency_", PercentileName(percentile), "_seconds")] =
        stats.latency.Percentile(percentile);
  }
  json["latency_max_seconds"] = stats.latency.max();
  json["late_by_generator"] = if_open_loop(late.by_generator);
  json["late_by_generator_seconds_max"] = if_open_loop(late.generator_seconds_max);
  json["late_by_server"] = if_open_loop(late.by_server);
  json["late_by_server_seconds_max"] = if_open_loop(late.server_seconds_max);
  json["unsent"] = if_open_loop(late.unsent);
  const std::optional<bool>& stable = load.measurement.stable;
  json["stable"] = stable.has_value() ? Json(*stable) : Json(nullptr);
  json["transport"] = stats.requests() > 0 ? Json(stats.TransportText()) : Json(nullptr);
  return json;
}

Json HistogramJson(const LatencyHistogram& histogram) {
  Json buckets = Json::array();
  histogram.ForEachBucket([&](double begin, double end, int64_t count) {
    buckets.push_back({begin, end, count});
  });
  return buckets;
}

Json ServerJson(const ServerFigures& server) {
  Json json = {{"seconds", server.seconds},
               {"rows_scored", server.rows_scored},
               {"batches", server.batches},
               {"batch_rows_mean", server.batch_rows_mean},
               {"queue_rows_peak", server.queue_rows_peak},
               {"received_bytes", server.received_bytes},
               {"cpu_seconds", server.cpu_seconds},
               {"cpu_seconds_per_gigabyte", server.cpu_seconds_per_gigabyte},
               {"resident_bytes_peak", server.resident_bytes_peak},
               {"rejected", Json::object()},
               {"stages", Json::array()},
               {"gpus", Json::array()}};
  for (const auto& [reason, count] : server.rejected) json["rejected"][reason] = count;
  for (const ServerFigures::Stage& stage : server.stages) {
    json["stages"].push_back(
        {{"stage", stage.name}, {"count", stage.count}, {"mean_seconds", stage.mean_seconds}});
  }
  for (const ServerFigures::Gpu& gpu : server.gpus) {
    json["gpus"].push_back(
        {{"gpu", gpu.name}, {"busy_ratio", gpu.busy_ratio}, {"teraflops", gpu.teraflops}});
  }
  return json;
}

Json VerificationJson(const Verification& verification) {
  const AnswerChecks& answers = verification.answers;
  Json json = {{"passed", verification.passed()},
               {"server_before", ToJson(verification.before)},
               {"server_after", ToJson(verification.after)},
               {"answers_nonfinite", answers.nonfinite},
               {"answers_compared", answers.compared},
               {"answers_different", answers.different}};
  if (!answers.first_difference.empty()) json["first_difference"] = answers.first_difference;
  return json;
}

Json LoadJson(const BenchReport& report, const BenchLoad& load) {
  const Interval& measured = load.measurement.measured;
  const SizeStats total = measured.Total();
  Json json = StatsJson(report, load, total);
  json["inflight_max"] = load.measurement.inflight_max;
  json["fresh"] = load.plan.fresh;
  json["seed"] = load.plan.seed;
  if (!measured.first_error.ok()) json["first_error"] = measured.first_error.ToString();
  json["sizes"] = Json::array();
  for (size_t i = 0; i < measured.sizes.size(); ++i) {
    Json size = StatsJson(report, load, measured.sizes[i], i);
    size["weight"] = load.plan.mix.sizes[i].weight;
    size["latency_histogram"] = HistogramJson(measured.sizes[i].latency);
    json["sizes"].push_back(std::move(size));
  }
  json["windows"] = Json::array();
  for (const WindowFigures& window : load.measurement.windows) {
    json["windows"].push_back({{"begin_seconds", window.begin_seconds},
                               {"seconds", window.seconds},
                               {"requests", window.requests},
                               {"errors", window.errors},
                               {"rows_per_second", window.rows_per_second},
                               {"latency_seconds", window.latency_seconds}});
  }
  json["latency_histogram"] = HistogramJson(total.latency);
  if (load.server.has_value()) json["server"] = ServerJson(*load.server);
  return json;
}

}  // namespace

std::string BenchLoad::Name() const {
  const std::string rows = plan.mix.sizes.size() == 1
                               ? absl::StrCat(CountText(plan.mix.sizes[0].rows), " rows")
                               : absl::StrCat("mix ", plan.mix.Text());
  return plan.is_open_loop() ? absl::StrFormat("%s, %g requests/s", rows, plan.request_rate)
                             : absl::StrCat(rows, ", ", CountText(plan.concurrency), " in flight");
}

std::string PercentileName(double percentile) { return absl::StrFormat("p%g", percentile); }

Json BenchJson(const BenchReport& report) {
  Json json = report.info;
  json["results"] = Json::array();
  for (const BenchLoad& load : report.loads) json["results"].push_back(LoadJson(report, load));
  if (report.verification.has_value()) {
    json["verification"] = VerificationJson(*report.verification);
  }
  if (!report.error.ok()) {
    json["error"] = {{"code", absl::StatusCodeToString(report.error.code())},
                     {"message", std::string(report.error.message())}};
  }
  return json;
}

absl::Status CheckExportPath(const std::string& path) {
  if (!std::ofstream(path, std::ios::app)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot write ", path, ": --export needs a file in an existing folder"));
  }
  return absl::OkStatus();
}

absl::Status ExportBench(const std::string& path, const BenchReport& report) {
  if (absl::Status status = CheckExportPath(path); !status.ok()) return status;
  std::ofstream file(path, std::ios::trunc);
  file << BenchJson(report).dump(2) << '\n';
  file.close();
  if (!file) return absl::InvalidArgumentError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

std::string CpuModelOf(absl::string_view cpuinfo) {
  for (absl::string_view line : absl::StrSplit(cpuinfo, '\n')) {
    if (!absl::ConsumePrefix(&line, "model name")) continue;
    line = absl::StripAsciiWhitespace(line);
    absl::ConsumePrefix(&line, ":");
    return std::string(absl::StripAsciiWhitespace(line));
  }
  return "unknown";
}

Json MachineJson() {
  std::ifstream file("/proc/cpuinfo");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  cpu_set_t allowed;
  const bool is_known = sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
  return {{"client_cpu", CpuModelOf(text)},
          {"client_cores", is_known ? CPU_COUNT(&allowed) : 1},
          {"date", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone())}};
}

std::string CommandLineText(const std::vector<std::string>& arguments) {
  std::string text = "logprobctl";
  for (const std::string& argument : arguments) {
    const bool is_plain =
        !argument.empty() && argument.find_first_not_of(
                                 "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                 "-_=:,./@%+[]") == std::string::npos;
    absl::StrAppend(&text, " ",
                    is_plain
                        ? argument
                        : absl::StrCat("'", absl::StrReplaceAll(argument, {{"'", "'\\''"}}), "'"));
  }
  return text;
}

}  // namespace logprobd::client
