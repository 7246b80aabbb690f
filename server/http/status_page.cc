#include "server/http/status_page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "server/base/head_info.h"
#include "server/base/text.h"
#include "server/http/status_page_style.h"

namespace logprobd {
namespace {

/// The text shown for a latency without observations.
constexpr const char* kNothing = "none in this period";

constexpr int64_t kMinute = 60;
constexpr int64_t kHour = 60 * kMinute;
constexpr int64_t kDay = 24 * kHour;

std::string WithThousands(int64_t number) {
  std::string digits = absl::StrCat(number);
  for (size_t place = digits.size(); place > 3;) {
    place -= 3;
    digits.insert(place, 1, ',');
  }
  return digits;
}

}  // namespace

std::string EscapeHtml(absl::string_view text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string HumanSeconds(double seconds) {
  if (seconds == 0) return "0";
  if (seconds < 0.9995e-3) return absl::StrFormat("%.3g µs", seconds * 1e6);
  if (seconds < 0.9995) return absl::StrFormat("%.3g ms", seconds * 1e3);
  if (seconds < kMinute) return absl::StrFormat("%.3g s", seconds);
  const auto whole = static_cast<int64_t>(seconds);
  if (whole < kHour) return absl::StrCat(whole / kMinute, " min ", whole % kMinute, " s");
  if (whole < kDay) return absl::StrCat(whole / kHour, " h ", whole % kHour / kMinute, " min");
  return absl::StrCat(whole / kDay, " d ", whole % kDay / kHour, " h");
}

std::string HumanNumber(double number) {
  if (number < 10) return absl::StrFormat("%.2g", number);
  if (number < 1e6) return WithThousands(std::llround(number));
  return number < 1e9 ? absl::StrFormat("%.2f M", number / 1e6)
                      : absl::StrFormat("%.2f G", number / 1e9);
}

std::string HumanShare(double ratio) {
  return ratio > 0 && ratio < 0.1 ? absl::StrFormat("%.1f%%", ratio * 100)
                                  : absl::StrFormat("%.0f%%", ratio * 100);
}

namespace {

/// Appends its arguments. Text from outside must go through EscapeHtml first.
template <typename... Pieces>
void Put(std::string& html, const Pieces&... pieces) {
  absl::StrAppend(&html, pieces...);
}

const char* ClassOf(ServingState state) {
  switch (state) {
    case ServingState::kReady:
      return "ready";
    case ServingState::kDegraded:
      return "degraded";
    case ServingState::kNotReady:
      break;
  }
  return "not-ready";
}

std::string Badge(ServingState state, absl::string_view text) {
  return absl::StrCat("<span class=\"badge ", ClassOf(state), "\">", EscapeHtml(text), "</span>");
}

void PutFigure(std::string& html, absl::string_view value, absl::string_view name,
               bool is_alarm = false) {
  Put(html, "<div><b", is_alarm ? " class=\"alarm\"" : "", ">", EscapeHtml(value), "</b><span>",
      EscapeHtml(name), "</span></div>\n");
}

void PutTerm(std::string& html, absl::string_view name, absl::string_view value) {
  Put(html, "<dt>", EscapeHtml(name), "</dt><dd>", EscapeHtml(value), "</dd>\n");
}

/// Returns one part of a bar; `begin` and `length` are fractions of the bar's width, 0 to 1.
std::string Part(double begin, double length, absl::string_view css_class,
                 absl::string_view title = "") {
  return absl::StrFormat(
      R"(<rect x="%.2f%%" y="0" width="%.2f%%" height="100%%" class="%s">%s</rect>)", begin * 100,
      length * 100, css_class,
      title.empty() ? "" : absl::StrCat("<title>", EscapeHtml(title), "</title>"));
}

std::string Bar(absl::string_view label, absl::string_view parts, absl::string_view css_class) {
  return absl::StrCat("<svg role=\"img\" class=\"", css_class, "\" aria-label=\"",
                      EscapeHtml(label), "\">", parts, "</svg>");
}

/// Appends `text` right-aligned in a column of `width` characters. Counts UTF-8 characters and not
/// bytes, because the result of HumanSeconds may contain a micro sign.
void PutRightAligned(std::string& out, absl::string_view text, size_t width) {
  const auto length = static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char byte) {
    return (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U;
  }));
  absl::StrAppend(&out, std::string(width - std::min(width, length), ' '), text);
}

double Share(double part, double whole) { return whole > 0 ? std::min(part / whole, 1.0) : 0; }

void PutLatencies(std::string& html, const std::vector<LatencySummary>& rows,
                  absl::string_view what) {
  double longest = 0;
  for (const LatencySummary& row : rows) longest = std::max(longest, row.p99_seconds);
  Put(html, "<table><tr><th>", what,
      "</th><th class=\"number wide\">count</th><th class=\"number\">p50</th>"
      "<th class=\"number\">p90</th><th class=\"number\">p99</th><th class=\"draw\"></th></tr>\n");
  for (const LatencySummary& row : rows) {
    const std::string name = EscapeHtml(row.name);
    if (row.count == 0) {
      Put(html, "<tr><td>", name,
          "</td><td class=\"number wide\">0</td><td class=\"soft\" colspan=\"4\">", kNothing,
          "</td></tr>\n");
      continue;
    }
    const std::string parts = absl::StrCat(Part(0, Share(row.p99_seconds, longest), "c1 light"),
                                           Part(0, Share(row.p90_seconds, longest), "c1 middle"),
                                           Part(0, Share(row.p50_seconds, longest), "c1"));
    Put(html, "<tr><td>", name, "</td><td class=\"number wide\">",
        HumanNumber(static_cast<double>(row.count)));
    for (const double seconds : {row.p50_seconds, row.p90_seconds, row.p99_seconds}) {
      Put(html, "</td><td class=\"number\">", HumanSeconds(seconds));
    }
    Put(html, "</td><td class=\"draw\">",
        Bar(absl::StrCat(row.name, ": p50, p90 and p99"), parts, "latency"), "</td></tr>\n");
  }
  Put(html, "</table>\n");
}

void PutLayout(std::string& html, const HeadStatus& head) {
  if (head.info.layout.empty()) return;
  Put(html,
      "<h3>Layout</h3>\n<table><tr><th>replica</th><th>shard</th><th>device</th>"
      "<th class=\"number\">ids</th><th></th></tr>\n");
  for (const ShardPlace& place : head.info.layout) {
    const auto replica = static_cast<size_t>(place.replica);
    const bool is_known = replica < head.is_replica_healthy.size();
    Put(html, "<tr><td>", place.replica, "</td><td>", place.shard, "</td><td>",
        EscapeHtml(place.device), "</td><td class=\"number\">", place.vocab_begin, " to ",
        place.vocab_end, "</td><td class=\"number\">",
        !is_known                          ? ""
        : head.is_replica_healthy[replica] ? "ok"
                                           : "<b class=\"alarm\">failed</b>",
        "</td></tr>\n");
  }
  Put(html, "</table>\n");
}

void PutHeadInfo(std::string& html, const HeadStatus& head) {
  const HeadInfo& info = head.info;
  const RequestLimits& limits = info.limits;
  const auto none_or = [](float value, float none) {
    return value == none ? std::string("none") : absl::StrCat(value);
  };
  Put(html, "<h3>Head</h3>\n<dl>");
  PutTerm(html, "model type", info.model_type);
  PutTerm(html, "tensor", absl::StrCat(info.tensor, info.tied ? " (tied)" : ""));
  PutTerm(html, "vocabulary", absl::StrCat(info.vocab_size, " ids, ", info.vocab_rows, " rows"));
  PutTerm(html, "hidden", absl::StrCat(info.hidden_size));
  PutTerm(
      html, "weight",
      absl::StrCat(absl::string_view(DtypeName(info.dtype)), ", ", HumanBytes(info.weight_bytes)));
  PutTerm(html, "bias, scale, cap",
          absl::StrCat(info.has_bias ? "yes" : "none", ", ", none_or(info.scale, 1), ", ",
                       none_or(info.softcap, 0)));
  PutTerm(html, "engine", absl::StrCat(info.engine, ": ", info.engine_reason));
  PutTerm(html, "rows per request", absl::StrCat("at most ", limits.request_rows_max));
  PutTerm(html, "message", absl::StrCat("at most ", HumanBytes(limits.message_bytes_max)));
  PutTerm(html, "candidates, top-k",
          absl::StrCat("at most ", limits.candidates_max, ", ", limits.top_k_max));
  PutTerm(html, "stream window", absl::StrCat(limits.stream_window, " chunks"));
  Put(html, "</dl>\n");
}

void PutQueue(std::string& html, const HeadStatus& head) {
  Put(html, "<h3>Queue</h3>\n<p>", HumanNumber(static_cast<double>(head.queue_rows)), " rows of ",
      HumanNumber(static_cast<double>(head.queue_requests)), " requests");
  if (head.queue_requests > 0) {
    Put(html, ", the oldest for ", HumanSeconds(head.queue_oldest_seconds));
  }
  if (head.queue_rows_max > 0) {
    const double share =
        Share(static_cast<double>(head.queue_rows), static_cast<double>(head.queue_rows_max));
    Put(html, "; at most ", HumanNumber(static_cast<double>(head.queue_rows_max)), " rows</p>\n",
        Bar(absl::StrCat("queue ", HumanShare(share), " full"),
            Part(0, share, share > 0.8 ? "c4" : "c2"), "queue"),
        "\n");
  } else {
    Put(html, "</p>\n");
  }
}

void PutHead(std::string& html, const HeadStatus& head) {
  Put(html, "<section class=\"head\"><h2><span>", EscapeHtml(head.info.name), "</span> ",
      Badge(head.state, head.state_text), "</h2>\n<div class=\"figures\">\n");
  PutFigure(html, HumanNumber(head.rows_per_second), "rows/s");
  PutFigure(html, HumanNumber(head.requests_per_second), "calls/s");
  PutFigure(html, HumanNumber(head.faults_per_second), "faults/s", head.faults_per_second > 0);
  PutFigure(html, HumanSeconds(head.latency.p99_seconds), "p99 latency");
  PutFigure(html, HumanNumber(head.batch_rows_mean), "rows per batch");
  PutFigure(html, HumanNumber(static_cast<double>(head.nonfinite_rows)), "nonfinite rows in total",
            head.nonfinite_rows > 0);
  PutFigure(html, absl::StrCat(head.info.weights_version), "weights version");
  Put(html, "</div>\n<div class=\"pair\"><div>");
  PutQueue(html, head);
  Put(html, "<h3>Latency</h3>\n");
  PutLatencies(html, {head.latency}, "calls");
  PutLayout(html, head);
  Put(html, "</div><div>");
  PutHeadInfo(html, head);
  Put(html, "</div></div></section>\n");
}

constexpr std::array kKinds = {"weights", "workspace", "staging", "other", "free"};
constexpr std::array kKindClasses = {"c1", "c2", "c3", "c4", "free"};

const char* ClassOfKind(absl::string_view kind) {
  const auto* const found = std::find(kKinds.begin(), kKinds.end(), kind);
  return found == kKinds.end() ? "c4" : kKindClasses[static_cast<size_t>(found - kKinds.begin())];
}

/// Draws a bar of the memory that is reserved at a place and lists its parts. A part that is only
/// an upper bound is listed but not drawn.
void PutMemoryPlace(std::string& html, const MemoryPlace& place) {
  double total = 0;
  for (const MemoryPart& part : place.parts) {
    total += part.is_bound ? 0 : static_cast<double>(part.bytes);
  }
  std::string parts;
  std::string key;
  double begin = 0;
  for (const MemoryPart& part : place.parts) {
    const std::string text = absl::StrCat(part.kind, " ", HumanBytes(part.bytes));
    if (part.is_bound) {
      Put(key, "<li>", EscapeHtml(text), " (at most)</li>");
      continue;
    }
    const double share = Share(static_cast<double>(part.bytes), total);
    const char* const css_class = ClassOfKind(part.kind);
    Put(parts, Part(begin, share, css_class, text));
    Put(key, "<li><i class=\"", css_class, "\"></i>", EscapeHtml(text),
        part.peak_bytes > part.bytes ? absl::StrCat(" (peak ", HumanBytes(part.peak_bytes), ")")
                                     : "",
        "</li>");
    begin += share;
  }
  Put(html, "<h3>", EscapeHtml(place.place), ", ", HumanBytes(static_cast<int64_t>(total)),
      "</h3>\n", Bar(absl::StrCat("memory of ", place.place), parts, "tall memory"),
      "\n<ul class=\"key\">", key, "</ul>\n");
}

void PutMemory(std::string& html, const std::vector<MemoryPlace>& memory) {
  Put(html, "<section><h2>Memory</h2>\n");
  for (const MemoryPlace& place : memory) PutMemoryPlace(html, place);
  Put(html, "</section>\n");
}

void PutGpus(std::string& html, const std::vector<GpuStatus>& gpus) {
  if (gpus.empty()) return;
  Put(html,
      "<section><h2>GPUs</h2>\n<table><tr><th>GPU</th><th class=\"number\">TFLOP/s</th>"
      "<th class=\"number\">busy</th><th class=\"number wide\">driver's use</th>"
      "<th class=\"number\">power</th><th class=\"number wide\">clock</th><th></th></tr>\n");
  for (const GpuStatus& gpu : gpus) {
    Put(html, "<tr><td>", gpu.gpu, "</td><td class=\"number\">", HumanNumber(gpu.tflops_per_second),
        "</td><td class=\"number\">", HumanShare(gpu.busy_ratio), "</td>");
    if (gpu.has_readings) {
      Put(html, "<td class=\"number wide\">", HumanShare(gpu.utilization_ratio),
          "</td><td class=\"number\">",
          absl::StrFormat("%.0f W</td><td class=\"number wide\">%.0f MHz", gpu.power_watts,
                          gpu.sm_clock_hertz / 1e6),
          "</td><td>", EscapeHtml(absl::StrJoin(gpu.throttled, ", ")), "</td></tr>\n");
    } else {
      Put(html, "<td class=\"soft\" colspan=\"4\">the driver gives no readings</td></tr>\n");
    }
  }
  Put(html, "</table></section>\n");
}

void PutServer(std::string& html, const StatusPage& page) {
  Put(html, "<section><h2>Server</h2>\n<div class=\"figures\">\n");
  const auto rate = [](double bytes) {
    return absl::StrCat(HumanBytes(static_cast<int64_t>(bytes)), "/s");
  };
  PutFigure(html, rate(page.received_bytes_per_second), "received");
  PutFigure(html, rate(page.sent_bytes_per_second), "sent");
  PutFigure(html, HumanNumber(page.refused_per_second), "refused/s", page.refused_per_second > 0);
  PutFigure(html, HumanSeconds(page.uptime_seconds), "running for");
  Put(html, "</div>\n<h3>Bytes held for requests</h3>\n<p>", HumanBytes(page.inflight_bytes),
      " of at most ", HumanBytes(page.inflight_bytes_max), "</p>\n",
      Bar("bytes held for requests",
          Part(0,
               Share(static_cast<double>(page.inflight_bytes),
                     static_cast<double>(page.inflight_bytes_max)),
               "c2"),
          "inflight"),
      "\n<h3>Process</h3>\n<dl>");
  for (const auto& [name, value] : page.process) PutTerm(html, name, value);
  Put(html, "</dl></section>\n");
}

}  // namespace

std::string RenderLatencyText(const StatusPage& page) {
  std::string text =
      absl::StrFormat("\nLatencies of the last %s\n%-26s %9s %10s %10s %10s\n",
                      HumanSeconds(page.window_seconds), "", "count", "p50", "p90", "p99");
  const auto put = [&text](absl::string_view name, const LatencySummary& row) {
    if (row.count == 0) {
      absl::StrAppendFormat(&text, "%-26s %9d   %s\n", name, 0, kNothing);
      return;
    }
    absl::StrAppendFormat(&text, "%-26s %9s", name, HumanNumber(static_cast<double>(row.count)));
    for (const double seconds : {row.p50_seconds, row.p90_seconds, row.p99_seconds}) {
      PutRightAligned(text, HumanSeconds(seconds), 11);
    }
    text += "\n";
  };
  for (const HeadStatus& head : page.heads) {
    put(absl::StrCat("calls of ", head.info.name), head.latency);
  }
  for (const LatencySummary& stage : page.stages) put(absl::StrCat("stage ", stage.name), stage);
  return text;
}

std::string RenderStatusPage(const StatusPage& page, int refresh_seconds) {
  std::string html;
  Put(html, "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n",
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
  if (refresh_seconds > 0) {
    Put(html, "<meta http-equiv=\"refresh\" content=\"", refresh_seconds, "\">\n");
  }
  // An empty icon keeps browsers from requesting one.
  Put(html, "<link rel=\"icon\" href=\"data:,\">\n<title>logprobd: ", EscapeHtml(page.state_text),
      "</title>\n<style>", kStatusPageStyle, "</style></head>\n<body>\n<header><h1>logprobd</h1>",
      Badge(page.state, page.state_text), "<span class=\"soft\">", EscapeHtml(page.version), " (",
      EscapeHtml(page.commit),
      ")</span><nav><a href=\"/metrics\">metrics</a><a href=\"/healthz\">healthz</a>"
      "<a href=\"/readyz\">readyz</a><a href=\"/?format=text\">text</a></nav></header>\n"
      "<p class=\"soft\">Rates and latencies cover the last ",
      HumanSeconds(page.window_seconds), ".",
      refresh_seconds > 0 ? absl::StrCat(" Reloaded every ", refresh_seconds, " s.") : "",
      "</p>\n");
  for (const std::string& warning : page.warnings) {
    Put(html, "<p><b>Warning:</b> ", EscapeHtml(warning), "</p>\n");
  }
  for (const HeadStatus& head : page.heads) PutHead(html, head);
  Put(html, "<div class=\"pair\">\n<div><section><h2>Latency by stage</h2>\n");
  PutLatencies(html, page.stages, "stage");
  Put(html, "</section>\n");
  PutGpus(html, page.gpus);
  Put(html, "</div>\n<div>");
  PutMemory(html, page.memory);
  PutServer(html, page);
  Put(html, "</div></div>\n</body></html>\n");
  return html;
}

}  // namespace logprobd
