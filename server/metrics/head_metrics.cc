#include "server/metrics/head_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/metrics/families.h"

namespace logprobd {
namespace {

constexpr const char* kMethodNames[kNumMethods] = {"Score", "ScoreStream", "ListHeads", "Verify"};
constexpr const char* kPriorityNames[kNumPriorities] = {"high", "normal", "low"};
// The order of the names is that of Metrics::WeightsSwap.
constexpr const char* kSwapNames[kNumSwapResults] = {"committed", "rolled_back", "failed",
                                                     "cancelled", "discarded"};
constexpr const char* kUnknownHead = "unknown";
constexpr auto kTcp = static_cast<size_t>(Metrics::Transport::kTcp);

}  // namespace

HeadMetrics::HeadMetrics(prometheus::Registry& registry, const std::vector<std::string>& heads)
    : requests_(
          AddCounters(registry, "logprobd_requests_total",
                      "Number of calls answered, by method, head and gRPC code. Each chunk of "
                      "a stream counts as one call.")),
      duration_(AddHistograms(registry, "logprobd_request_duration_seconds",
                              "Time from the arrival of a call to its response, in seconds.")),
      rows_(AddCounters(registry, "logprobd_rows_total",
                        "Number of rows answered, by kind: scored, ignored (the target is "
                        "ignore_index) or nonfinite (the logits hold NaN or Inf).")),
      batch_rows_(AddHistograms(registry, "logprobd_batch_rows", "Number of rows in a batch.")),
      batch_requests_(AddHistograms(registry, "logprobd_batch_requests",
                                    "Number of requests with rows in a batch.")),
      queue_rows_(
          AddGauges(registry, "logprobd_queue_rows", "Number of rows that wait for a batch.")),
      queue_bytes_(
          AddGauges(registry, "logprobd_queue_bytes",
                    "Size of the data held for requests, in bytes. A message counts until it is "
                    "copied into a batch; the request's fields and response count until the "
                    "request is answered.")),
      queue_requests_(AddGauges(registry, "logprobd_queue_requests",
                                "Number of requests that wait for a batch.")),
      queue_oldest_age_(AddGauges(registry, "logprobd_queue_oldest_age_seconds",
                                  "Time that the longest-waiting request has waited, in seconds.")),
      weights_version_(
          AddGauges(registry, "logprobd_weights_version",
                    "Version number of the live weights, or 0 before they are loaded.")),
      ready_(AddGauges(registry, "logprobd_ready", "1 if the head can score, otherwise 0.")),
      replicas_(
          AddGauges(registry, "logprobd_replicas",
                    "Number of replicas of the head, by state: healthy, or failed (it no longer "
                    "scores).")),
      weights_load_(AddHistograms(registry, "logprobd_weights_load_duration_seconds",
                                  "Time to load a head's weight into its engines, in seconds.")),
      weights_swaps_(
          AddCounters(registry, "logprobd_weights_swaps_total",
                      "Number of replacements of a head's weights while it serves, by "
                      "result: committed, rolled_back (to the previous version), failed, "
                      "cancelled or discarded (pushed rows that were dropped before "
                      "all had arrived); the last three do not change the live "
                      "weights.")),
      info_(AddGauges(registry, "logprobd_head_info", "Always 1; the labels describe the head.")) {
  for (const std::string& head : heads) {
    if (heads_.try_emplace(head).second) CreateSeries(head, true);
  }
  CreateSeries(kUnknownHead, false);
}

void HeadMetrics::CreateSeries(const std::string& head, bool configured) {
  const std::string label = LabelValue(head);
  HeadSeries& series = configured ? heads_.find(head)->second : unknown_;
  for (size_t method = 0; method < kNumMethods; ++method) {
    for (size_t code = 0; code < kNumCodes; ++code) {
      series.requests[method][code] =
          &requests_.Add({{"method", kMethodNames[method]},
                          {"head", label},
                          {"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}});
    }
    series.durations[method][kTcp] = &AddDuration(method, label, kTcp);
  }
  if (!configured) return;
  series.rows_scored = &rows_.Add({{"head", label}, {"kind", "scored"}});
  series.rows_ignored = &rows_.Add({{"head", label}, {"kind", "ignored"}});
  series.rows_nonfinite = &rows_.Add({{"head", label}, {"kind", "nonfinite"}});
  series.batch_rows = &batch_rows_.Add({{"head", label}}, CountBuckets());
  series.batch_requests = &batch_requests_.Add({{"head", label}}, CountBuckets());
  for (size_t priority = 0; priority < kNumPriorities; ++priority) {
    const prometheus::Labels labels = {{"head", label}, {"priority", kPriorityNames[priority]}};
    series.queue_rows[priority] = &queue_rows_.Add(labels);
    series.queue_bytes[priority] = &queue_bytes_.Add(labels);
    series.queue_requests[priority] = &queue_requests_.Add(labels);
  }
  series.queue_oldest_age = &queue_oldest_age_.Add({{"head", label}});
  series.weights_version = &weights_version_.Add({{"head", label}});
  series.ready = &ready_.Add({{"head", label}});
  series.replicas_healthy = &replicas_.Add({{"head", label}, {"state", "healthy"}});
  series.replicas_failed = &replicas_.Add({{"head", label}, {"state", "failed"}});
  series.weights_load = &weights_load_.Add({{"head", label}}, LoadBuckets());
  for (size_t result = 0; result < kNumSwapResults; ++result) {
    series.weights_swaps[result] =
        &weights_swaps_.Add({{"head", label}, {"result", kSwapNames[result]}});
  }
}

HeadSeries& HeadMetrics::Any(absl::string_view head) {
  HeadSeries* const series = Configured(head);
  return series == nullptr ? unknown_ : *series;
}

HeadSeries* HeadMetrics::Configured(absl::string_view head) {
  const auto found = heads_.find(head);
  return found == heads_.end() ? nullptr : &found->second;
}

prometheus::Histogram& HeadMetrics::AddDuration(size_t method, const std::string& head_label,
                                                size_t transport) {
  return duration_.Add({{"method", kMethodNames[method]},
                        {"head", head_label},
                        {"transport", kTransportNames[transport]}},
                       DurationBuckets());
}

void HeadMetrics::ObserveRequest(Metrics::Method method, absl::string_view head,
                                 Metrics::Transport transport, double seconds) {
  const auto method_index = static_cast<size_t>(method);
  const auto transport_index = static_cast<size_t>(transport);
  std::atomic<prometheus::Histogram*>& kept = Any(head).durations[method_index][transport_index];
  prometheus::Histogram* series = kept.load(std::memory_order_acquire);
  if (series == nullptr) {
    // Threads that get here at the same time get the same series.
    const std::string label = Configured(head) == nullptr ? kUnknownHead : LabelValue(head);
    series = &AddDuration(method_index, label, transport_index);
    kept.store(series, std::memory_order_release);
  }
  series->Observe(seconds);
}

double HeadMetrics::QueuedBytes() const {
  double bytes = 0;
  for (const auto& [name, series] : heads_) {
    for (const prometheus::Gauge* const gauge : series.queue_bytes) bytes += gauge->Value();
  }
  return bytes;
}

void HeadMetrics::SetInfo(const HeadInfo& info) {
  HeadSeries* const series = Configured(info.name);
  if (series == nullptr) return;
  series->weights_version->Set(static_cast<double>(info.weights_version));
  const ShardPlace last = info.layout.empty() ? ShardPlace() : info.layout.back();
  // The lock is taken before Add, so that no other thread removes the series that Add finds.
  const absl::MutexLock lock(&info_mutex_);
  prometheus::Gauge& info_series = info_.Add({{"head", LabelValue(info.name)},
                                              {"model_type", LabelValue(info.model_type)},
                                              {"tensor", LabelValue(info.tensor)},
                                              {"hidden", absl::StrCat(info.hidden_size)},
                                              {"vocab", absl::StrCat(info.vocab_size)},
                                              {"vocab_rows", absl::StrCat(info.vocab_rows)},
                                              {"dtype", std::string(DtypeName(info.dtype))},
                                              {"tied", info.tied ? "true" : "false"},
                                              {"bias", info.has_bias ? "true" : "false"},
                                              {"scale", absl::StrCat(info.scale)},
                                              {"softcap", absl::StrCat(info.softcap)},
                                              {"engine", LabelValue(info.engine)},
                                              {"replicas", absl::StrCat(last.replica + 1)},
                                              {"shards", absl::StrCat(last.shard + 1)}});
  info_series.Set(1);
  prometheus::Gauge*& current = info_series_[info.name];
  if (current != nullptr && current != &info_series) info_.Remove(current);
  current = &info_series;
}

}  // namespace logprobd
