#include "client/cli/bench/html_plots.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/bench/svg_plot.h"
#include "client/cli/table.h"

namespace logprobd::client {
namespace {

/// More lines than colours would not be told apart.
constexpr size_t kLinesMax = 8;

std::string Legend(const std::vector<PlotSeries>& series) {
  if (series.size() < 2) return "";
  std::string html = "<div class=\"legend\">";
  for (const PlotSeries& one : series) {
    absl::StrAppendFormat(&html, "<span><i class=\"c%d%s\"></i>%s</span>", one.color,
                          one.is_dashed ? " dashed" : "", HtmlText(one.name));
  }
  return html + "</div>";
}

std::string LineCard(const std::string& title, const std::string& note, const PlotAxis& x,
                     const PlotAxis& y, const std::vector<PlotSeries>& series) {
  const std::string plot = LinePlot(x, y, series);
  return plot.empty() ? "" : HtmlCard(title, note, Legend(series) + plot);
}

/// Up to kLinesMax of the loads, spread over all, the first and the last among them.
std::vector<const BenchLoad*> ShownLoads(const BenchReport& report) {
  const size_t all = report.loads.size();
  const size_t shown = std::min(all, kLinesMax);
  std::vector<const BenchLoad*> loads;
  for (size_t i = 0; i < shown; ++i) {
    loads.push_back(&report.loads[shown < 2 ? 0 : i * (all - 1) / (shown - 1)]);
  }
  return loads;
}

/// Where a percentile stands so that 90, 99, 99.9 are equally far apart.
double NinesPlace(double percent) { return -std::log10(1 - percent / 100); }

std::string PercentileCard(const BenchReport& report) {
  PlotAxis x = {.label = "percentile", .ticks = {{0, "0"}, {NinesPlace(50), "50"}, {1, "90"}}};
  std::vector<PlotSeries> series;
  double end = 1;
  for (const BenchLoad* load : ShownLoads(report)) {
    const LatencyHistogram latency = load->measurement.measured.Total().latency;
    if (latency.count() == 0) continue;
    PlotSeries line = {
        .name = load->Name(), .color = static_cast<int>(series.size()), .has_markers = false};
    // To the last percentile that one value decides.
    const double last = std::max(std::log10(static_cast<double>(latency.count())), 0.3);
    constexpr int kSteps = 80;
    for (int i = 0; i <= kSteps; ++i) {
      const double place = last * i / kSteps;
      line.points.emplace_back(place, latency.Percentile(100 * (1 - std::pow(10, -place))) * 1e3);
    }
    end = std::max(end, last);
    series.push_back(std::move(line));
  }
  for (int nines = 2; nines <= static_cast<int>(end); ++nines) {
    x.ticks.emplace_back(nines, absl::StrFormat("%.*f", nines - 2, 100 - std::pow(10, 2 - nines)));
  }
  const std::string note = report.loads.size() > kLinesMax
                               ? absl::StrCat(kLinesMax, " of ", report.loads.size(), " loads.")
                               : "";
  return LineCard("Latency by percentile", note, x,
                  {.label = "latency, ms", .is_logarithmic = true}, series);
}

std::string HistogramCard(const BenchReport& report) {
  constexpr int kBars = 40;
  // The load that matters most to a reader of a single one; of several the busiest.
  const BenchLoad* shown = nullptr;
  for (const BenchLoad& load : report.loads) {
    if (shown == nullptr || load.rows_per_second() > shown->rows_per_second()) shown = &load;
  }
  if (shown == nullptr) return "";
  const LatencyHistogram latency = shown->measurement.measured.Total().latency;
  if (latency.count() == 0 || latency.min() <= 0) return "";
  const double least = latency.min() * 1e3;
  const double ratio = std::max(latency.max() / latency.min(), 1.02);
  std::vector<PlotBar> bars(kBars);
  for (int i = 0; i < kBars; ++i) {
    bars[static_cast<size_t>(i)].begin = least * std::pow(ratio, static_cast<double>(i) / kBars);
    bars[static_cast<size_t>(i)].end = least * std::pow(ratio, static_cast<double>(i + 1) / kBars);
  }
  latency.ForEachBucket([&](double begin, double end, int64_t count) {
    const double middle = std::clamp((begin + end) / 2, latency.min(), latency.max()) * 1e3;
    const auto bar = static_cast<int>(std::log(middle / least) / std::log(ratio) * kBars);
    bars[static_cast<size_t>(std::clamp(bar, 0, kBars - 1))].value += static_cast<double>(count);
  });
  for (PlotBar& bar : bars) {
    bar.title = absl::StrFormat("%s to %s ms: %s requests", ShortNumber(bar.begin),
                                ShortNumber(bar.end), CountText(static_cast<int64_t>(bar.value)));
  }
  return HtmlCard(
      "Latency histogram",
      shown->Name() + (report.loads.size() > 1 ? ", the most rows a second." : ""),
      Histogram({.label = "latency, ms", .is_logarithmic = true}, {.label = "requests"}, bars));
}

/// Loads of the same sizes, by rising load.
std::map<std::string, std::vector<const BenchLoad*>> Sweeps(const BenchReport& report) {
  std::map<std::string, std::vector<const BenchLoad*>> sweeps;
  for (const BenchLoad& load : report.loads) {
    if (sweeps.size() == kLinesMax && !sweeps.contains(load.plan.mix.Text())) continue;
    sweeps[load.plan.mix.Text()].push_back(&load);
  }
  return sweeps;
}

double LoadValue(const BenchLoad& load) {
  return load.plan.request_rate > 0 ? load.plan.request_rate
                                    : static_cast<double>(load.plan.concurrency);
}

bool IsSpread(const std::vector<PlotSeries>& series) {
  double least = 0;
  double most = 0;
  for (const PlotSeries& one : series) {
    for (const auto& point : one.points) {
      if (point.second > 0 && (least == 0 || point.second < least)) least = point.second;
      most = std::max(most, point.second);
    }
  }
  return least > 0 && most / least > 30;
}

std::string LoadCards(const BenchReport& report) {
  const bool is_open = report.loads.front().plan.request_rate > 0;
  PlotAxis x = {.label = is_open ? "requests a second asked" : "requests in flight"};
  std::vector<PlotSeries> throughput;
  std::vector<PlotSeries> latency;
  double least = LoadValue(report.loads.front());
  double most = least;
  int color = 0;
  for (const auto& [rows, loads] : Sweeps(report)) {
    PlotSeries rate = {.name = rows + " rows", .color = color};
    PlotSeries median = {.name = rows + " rows, p50", .color = color};
    PlotSeries tail = {.name = rows + " rows, p99", .color = color, .is_dashed = true};
    for (const BenchLoad* load : loads) {
      const SizeStats total = load->measurement.measured.Total();
      const double value = LoadValue(*load);
      least = std::min(least, value);
      most = std::max(most, value);
      rate.points.emplace_back(value, load->rows_per_second());
      if (total.requests() == 0) continue;
      median.points.emplace_back(value, total.latency.Percentile(50) * 1e3);
      tail.points.emplace_back(value, total.latency.Percentile(99) * 1e3);
    }
    throughput.push_back(std::move(rate));
    latency.push_back(std::move(median));
    latency.push_back(std::move(tail));
    ++color;
  }
  x.is_logarithmic = most / least >= 16;
  for (std::vector<PlotSeries>* series : {&throughput, &latency}) {
    for (PlotSeries& one : *series) std::sort(one.points.begin(), one.points.end());
  }
  return LineCard("Throughput against load", "", x,
                  {.label = "rows a second", .is_logarithmic = IsSpread(throughput)}, throughput) +
         LineCard("Latency against load", "", x,
                  {.label = "latency, ms", .is_logarithmic = IsSpread(latency)}, latency);
}

/// Of a single load there is no curve over loads, but one over time.
std::string TimeCards(const BenchLoad& load) {
  PlotSeries throughput = {.name = "rows a second"};
  PlotSeries latency = {.name = "latency", .color = 1};
  for (const WindowFigures& window : load.measurement.windows) {
    const double middle = window.begin_seconds + window.seconds / 2;
    throughput.points.emplace_back(middle, window.rows_per_second);
    latency.points.emplace_back(middle, window.latency_seconds * 1e3);
  }
  const PlotAxis x = {.label = "seconds since measuring began"};
  return LineCard("Throughput over time", "By window.", x, {.label = "rows a second"},
                  {throughput}) +
         LineCard("Latency over time",
                  absl::StrCat(PercentileName(load.plan.stability.percentile), " of each window."),
                  x, {.label = "latency, ms"}, {latency});
}

std::string StageCard(const BenchReport& report) {
  std::vector<std::string> names;
  std::vector<PlotSeries> legend;
  std::vector<BarGroup> groups;
  std::vector<const BenchLoad*> loads;
  for (const BenchLoad* load : ShownLoads(report)) {
    if (!load->server.has_value()) continue;
    legend.push_back({.name = load->Name(), .color = static_cast<int>(names.size())});
    names.push_back(load->Name());
    loads.push_back(load);
  }
  for (const char* stage :
       {"receive", "copy", "queue", "h2d", "kernel", "combine", "d2h", "reply"}) {
    BarGroup group = {.name = stage, .values = std::vector<double>(loads.size(), -1)};
    bool has_any = false;
    for (size_t i = 0; i < loads.size(); ++i) {
      for (const ServerFigures::Stage& found : loads[i]->server->stages) {
        if (found.name != stage) continue;
        group.values[i] = found.mean_seconds * 1e3;
        has_any = true;
      }
    }
    if (has_any) groups.push_back(std::move(group));
  }
  const std::string plot = BarGroups("ms", names, groups);
  return plot.empty()
             ? ""
             : HtmlCard("Server stages",
                        "Mean milliseconds, from the server's metrics. Stages overlap: they do "
                        "not add up to the latency.",
                        Legend(legend) + plot);
}

}  // namespace

std::string HtmlCard(const std::string& title, const std::string& note,
                     const std::string& content) {
  if (content.empty()) return "";
  return absl::StrCat(
      "<section class=\"card\"><h2>", HtmlText(title), "</h2>",
      note.empty() ? "" : absl::StrCat("<p class=\"soft\">", HtmlText(note), "</p>"), content,
      "</section>\n");
}

std::string BenchPlots(const BenchReport& report) {
  if (report.loads.empty()) return "";
  const std::string by_load =
      report.loads.size() > 1 ? LoadCards(report) : TimeCards(report.loads.front());
  return by_load + PercentileCard(report) + HistogramCard(report) + StageCard(report);
}

}  // namespace logprobd::client
