#include "server/metrics/head_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/metrics/label_value.h"

namespace logprobd {
namespace {

constexpr const char* kMethodNames[kNumMethods] = {"Score", "ScoreStream", "ListHeads", "Verify"};
constexpr const char* kPriorityNames[kNumPriorities] = {"high", "normal", "low"};
// In the order of Metrics::WeightsSwap.
constexpr const char* kSwapNames[kNumSwapResults] = {"committed", "rolled_back", "failed",
                                                     "cancelled"};
constexpr const char* kUnknownHead = "unknown";
constexpr auto kTcp = static_cast<size_t>(Metrics::Transport::kTcp);

}  // namespace

HeadMetrics::HeadMetrics(prometheus::Registry& registry, const std::vector<std::string>& heads)
    : requests_(AddCounters(registry, "logprobd_requests_total",
                            "Calls answered, by method, head and gRPC code; a chunk of a stream "
                            "counts as a call.")),
      duration_(AddHistograms(registry, "logprobd_request_duration_seconds",
                              "Time from a call's arrival to its answer, in seconds.")),
      rows_(AddCounters(registry, "logprobd_rows_total",
                        "Rows answered, by kind: scored, ignored (the target is ignore_index) or "
                        "nonfinite (their logits held NaN or Inf).")),
      batch_rows_(AddHistograms(registry, "logprobd_batch_rows", "Rows of an engine call.")),
      batch_requests_(AddHistograms(registry, "logprobd_batch_requests",
                                    "Requests that had rows in an engine call.")),
      queue_rows_(AddGauges(registry, "logprobd_queue_rows", "Rows waiting for a batch.")),
      queue_bytes_(
          AddGauges(registry, "logprobd_queue_bytes",
                    "Bytes charged to requests: messages until they are copied into a batch, "
                    "their fields and answers until they are answered.")),
      queue_requests_(
          AddGauges(registry, "logprobd_queue_requests", "Requests waiting for a batch.")),
      queue_oldest_age_(AddGauges(registry, "logprobd_queue_oldest_age_seconds",
                                  "Time that the oldest waiting request has waited, in seconds.")),
      weights_version_(AddGauges(registry, "logprobd_weights_version",
                                 "Version of the live weights; 0 before they are loaded.")),
      ready_(AddGauges(registry, "logprobd_ready", "1 when the head can score, else 0.")),
      replicas_(
          AddGauges(registry, "logprobd_replicas",
                    "Replicas of the head, by state: healthy or failed (it scores no more).")),
      weights_load_(AddHistograms(registry, "logprobd_weights_load_duration_seconds",
                                  "Time to read a head's weight into its engine, in seconds.")),
      weights_swaps_(AddCounters(registry, "logprobd_weights_swaps_total",
                                 "Replacements of a head's weights while it serves, by result: "
                                 "committed, rolled_back (to the version before), failed or "
                                 "cancelled (the live weights stay).")),
      info_(AddGauges(registry, "logprobd_head_info", "1; the labels are the head's facts.")) {
  for (const std::string& head : heads) {
    if (heads_.try_emplace(head).second) {
      CreateSeries(head, true);
    }
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
  if (!configured) {
    return;
  }
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
    // Who comes at the same time gets the same series.
    const std::string label = Configured(head) == nullptr ? kUnknownHead : LabelValue(head);
    series = &AddDuration(method_index, label, transport_index);
    kept.store(series, std::memory_order_release);
  }
  series->Observe(seconds);
}

double HeadMetrics::QueuedBytes() const {
  double bytes = 0;
  for (const auto& [name, series] : heads_) {
    for (const prometheus::Gauge* const gauge : series.queue_bytes) {
      bytes += gauge->Value();
    }
  }
  return bytes;
}

void HeadMetrics::SetInfo(const HeadInfo& info) {
  HeadSeries* const series = Configured(info.name);
  if (series == nullptr) {
    return;
  }
  series->weights_version->Set(static_cast<double>(info.weights_version));
  const ShardPlace last = info.layout.empty() ? ShardPlace() : info.layout.back();
  const absl::MutexLock lock(&info_mutex_);  // before Add: what it finds must not be removed
  prometheus::Gauge& facts = info_.Add({{"head", LabelValue(info.name)},
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
  facts.Set(1);
  prometheus::Gauge*& current = info_series_[info.name];
  if (current != nullptr && current != &facts) {
    info_.Remove(current);
  }
  current = &facts;
}

}  // namespace logprobd
