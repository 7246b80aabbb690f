#include "client/cli/bench/server_figures.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace logprobd::client {
namespace {

constexpr const char* kStages[] = {"receive", "copy",    "queue", "h2d",
                                   "kernel",  "combine", "d2h",   "reply"};

}  // namespace

void ServerPeaks::Add(const MetricsPage& page, const std::string& head) {
  queue_rows = std::max(queue_rows, page.Sum("logprobd_queue_rows", {{"head", head}}));
  resident_bytes = std::max(resident_bytes, page.Sum("process_resident_memory_bytes"));
}

absl::StatusOr<ServerFigures> CompareMetrics(const MetricsPage& before, const MetricsPage& after,
                                             const std::string& head, const ServerPeaks& peaks,
                                             double seconds) {
  for (const MetricsPage* page : {&before, &after}) {
    if (!page->Has("logprobd_rows_total")) {
      return absl::InvalidArgumentError(
          "the page has no logprobd_rows_total: give --metrics the HTTP address of a logprobd");
    }
  }
  constexpr char kStart[] = "process_start_time_seconds";
  if (before.Sum(kStart) != after.Sum(kStart)) {
    return absl::AbortedError("the server was started anew during the run");
  }
  const auto delta = [&](absl::string_view name, const MetricsPage::Labels& labels) {
    return after.Sum(name, labels) - before.Sum(name, labels);
  };
  const auto mean = [](double sum, double count) { return count > 0 ? sum / count : 0; };

  ServerFigures figures;
  figures.seconds = seconds;
  figures.rows_scored = delta("logprobd_rows_total", {{"head", head}, {"kind", "scored"}});
  figures.batches = delta("logprobd_batch_rows_count", {{"head", head}});
  figures.batch_rows_mean =
      mean(delta("logprobd_batch_rows_sum", {{"head", head}}), figures.batches);
  for (const char* name : kStages) {
    const MetricsPage::Labels labels = {{"stage", name}};
    const double count = delta("logprobd_stage_duration_seconds_count", labels);
    if (count <= 0) continue;
    figures.stages.push_back(
        {.name = name,
         .count = static_cast<int64_t>(count),
         .mean_seconds = mean(delta("logprobd_stage_duration_seconds_sum", labels), count)});
  }
  figures.queue_rows_peak = peaks.queue_rows;
  for (const std::string& reason : after.LabelValues("logprobd_rejected_total", "reason")) {
    const double count = delta("logprobd_rejected_total", {{"reason", reason}});
    if (count > 0) figures.rejected.emplace_back(reason, count);
  }
  figures.received_bytes = delta("logprobd_received_bytes_total", {});
  figures.cpu_seconds = delta("process_cpu_seconds_total", {});
  figures.cpu_seconds_per_gigabyte = mean(figures.cpu_seconds, figures.received_bytes / 1e9);
  figures.resident_bytes_peak = peaks.resident_bytes;
  for (const std::string& gpu : after.LabelValues("logprobd_gpu_busy_seconds_total", "gpu")) {
    const MetricsPage::Labels labels = {{"gpu", gpu}};
    figures.gpus.push_back(
        {.name = gpu,
         .busy_ratio = mean(delta("logprobd_gpu_busy_seconds_total", labels), seconds),
         .teraflops = mean(delta("logprobd_flops_total", labels) / 1e12, seconds)});
  }
  return figures;
}

}  // namespace logprobd::client
