#include "client/cli/bench/html_report.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/bench/bench_cells.h"
#include "client/cli/bench/html_plots.h"
#include "client/cli/bench/svg_plot.h"
#include "client/cli/table.h"

namespace logprobd::client {
namespace {

constexpr char kStyle[] = R"(
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1c1c1a;--soft:#62625c;--rule:#e4e4df;--grid:#ecece8;
--good:#0a7a43;--bad:#b3261e;--warn:#8a5a00;--warnbg:#fff6e0;
--c0:#2563eb;--c1:#d97706;--c2:#059669;--c3:#9333ea;--c4:#db2777;--c5:#0891b2;--c6:#65a30d;--c7:#78716c}
@media(prefers-color-scheme:dark){:root{--bg:#161615;--card:#1f1f1d;--ink:#ecece8;--soft:#a3a39b;--rule:#363632;--grid:#2c2c29;
--good:#4ade80;--bad:#f87171;--warn:#fbbf24;--warnbg:#2e2614;
--c0:#60a5fa;--c1:#fbbf24;--c2:#34d399;--c3:#c084fc;--c4:#f472b6;--c5:#22d3ee;--c6:#a3e635;--c7:#a8a29e}}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px 16px 48px;max-width:1180px;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0 0 2px;line-height:1.25}h2{font-size:1.05rem;margin:0 0 4px}
p{margin:4px 0}.soft{color:var(--soft);font-size:.9rem}
code{font:13px/1.5 ui-monospace,monospace;overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px;margin-top:16px}
.grid{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));margin-top:16px}.grid .card{margin:0}
.tiles{display:grid;gap:10px 24px;grid-template-columns:repeat(auto-fit,minmax(150px,1fr))}
.tiles b{display:block;font-size:1.3rem;font-weight:600;line-height:1.3}.tiles span{color:var(--soft);font-size:.85rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:5px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
th{color:var(--soft);font-weight:500}th:first-child,td:first-child{text-align:left;padding-left:0}tr:last-child td{border-bottom:0}
td.sub{padding-left:16px!important;color:var(--soft)}
.warn{background:var(--warnbg);border-color:var(--warn);padding-left:34px;font-size:.9rem}.good{color:var(--good)}.bad{color:var(--bad)}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;font-size:.9rem}.facts dt{color:var(--soft)}.facts dd{margin:0;overflow-wrap:anywhere}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.85rem;color:var(--soft);margin:2px 0 4px}
.legend i{display:inline-block;width:14px;height:0;border-top:3px solid;vertical-align:middle;margin-right:5px}.legend i.dashed{border-top-style:dotted}
svg{display:block;width:100%;height:auto}svg text{fill:var(--soft);font:13px system-ui,sans-serif;font-variant-numeric:tabular-nums}
svg .label{fill:var(--ink)}svg .mid{text-anchor:middle}svg .end{text-anchor:end}
svg .rule{stroke:var(--grid)}svg .axis{stroke:var(--soft);fill:none}svg .line{fill:none;stroke-width:2.2;stroke-linejoin:round}svg .dashed{stroke-dasharray:5 4}
)";

/// Classes c0 to c7: what is drawn as a line takes the colour as stroke, the rest as fill.
std::string ColorStyle() {
  std::string css;
  for (int i = 0; i < 8; ++i) {
    absl::StrAppendFormat(
        &css,
        "svg rect.c%1$d,svg circle.c%1$d{fill:var(--c%1$d)}"
        "svg path.c%1$d{stroke:var(--c%1$d)}.legend i.c%1$d{border-color:var(--c%1$d)}\n",
        i);
  }
  return css;
}

std::string Row(const std::vector<std::string>& cells, const char* element,
                const char* first = "") {
  std::string html = "<tr>";
  for (size_t i = 0; i < cells.size(); ++i) {
    absl::StrAppendFormat(&html, "<%1$s%2$s>%3$s</%1$s>", element,
                          i == 0 && *first != '\0' ? absl::StrFormat(" class=\"%s\"", first) : "",
                          HtmlText(cells[i]));
  }
  return html + "</tr>\n";
}

std::string ResultTable(const BenchReport& report) {
  const auto named = [](std::string name, std::vector<std::string> cells) {
    cells.insert(cells.begin(), std::move(name));
    return cells;
  };
  std::string html =
      "<div class=\"scroll\"><table>" + Row(named("load", FigureHeader(report)), "th");
  for (const BenchLoad& load : report.loads) {
    const Interval& measured = load.measurement.measured;
    html += Row(named(load.Name(), FigureCells(report, load, measured.Total())), "td");
    if (measured.sizes.size() < 2) continue;
    for (size_t i = 0; i < measured.sizes.size(); ++i) {
      html += Row(named(absl::StrCat("of ", CountText(load.plan.mix.sizes[i].rows), " rows"),
                        FigureCells(report, load, measured.sizes[i])),
                  "td", "sub");
    }
  }
  return html + "</table></div>";
}

std::string ServerTable(const BenchReport& report) {
  std::string rows;
  for (const BenchLoad& load : report.loads) {
    if (!load.server.has_value()) continue;
    std::vector<std::string> cells = ServerCells(*load.server);
    cells.insert(cells.begin(), load.Name());
    rows += Row(cells, "td");
  }
  if (rows.empty()) return "";
  std::vector<std::string> header = ServerHeader();
  header.insert(header.begin(), "load");
  return absl::StrCat("<div class=\"scroll\"><table>", Row(header, "th"), rows, "</table></div>");
}

std::string Tile(const std::string& value, const std::string& name) {
  return absl::StrCat("<div><b>", HtmlText(value), "</b><span>", HtmlText(name), "</span></div>");
}

std::string Headline(const BenchReport& report) {
  const BenchLoad* best = &report.loads.front();
  for (const BenchLoad& load : report.loads) {
    if (load.rows_per_second() > best->rows_per_second()) best = &load;
  }
  const LatencyHistogram latency = best->measurement.measured.Total().latency;
  std::string tiles =
      Tile(ShortNumber(best->rows_per_second()), "rows a second") +
      Tile(absl::StrFormat("%.3g GB/s", report.gigabytes_per_second(best->rows_per_second())),
           "hidden states") +
      Tile(MillisecondsText(latency.Percentile(50)) + " ms", "median latency") +
      Tile(MillisecondsText(latency.Percentile(99)) + " ms", "p99 latency");
  const std::string note =
      report.loads.size() > 1
          ? absl::StrCat("<p class=\"soft\">Of the load with the most rows a second: ",
                         HtmlText(best->Name()), ".</p>")
          : absl::StrCat("<p class=\"soft\">", HtmlText(best->Name()), ".</p>");
  return absl::StrCat("<section class=\"card\"><div class=\"tiles\">", tiles, "</div>", note,
                      "</section>\n");
}

std::string WarningCard(const BenchReport& report) {
  std::string html;
  for (const std::string& warning : BenchWarnings(report)) {
    absl::StrAppend(&html, "<li>", HtmlText(warning), "</li>");
  }
  return html.empty() ? "" : absl::StrCat("<ul class=\"card warn\">", html, "</ul>\n");
}

std::string VerificationCard(const BenchReport& report) {
  if (!report.verification.has_value()) return "";
  const Verification& found = *report.verification;
  std::string html = absl::StrFormat(
      "<p><b class=\"%s\">%s</b> %d rows against double precision: largest difference of a logprob "
      "%.2e nats (tolerance %.0e), of an entropy %.2e (tolerance %.0e).</p><p>%s answers compared "
      "with the first to the same row: %s.</p>",
      found.passed() ? "good" : "bad", found.passed() ? "PASS" : "FAIL", found.rows,
      found.logprob_difference_max, found.logprob_tolerance, found.entropy_difference_max,
      found.entropy_tolerance, CountText(found.answers_compared),
      found.answers_different == 0 ? "all bits equal"
                                   : CountText(found.answers_different) + " with other bits");
  if (!found.first_difference.empty()) {
    absl::StrAppend(&html, "<p class=\"bad\">", HtmlText(found.first_difference), "</p>");
  }
  return HtmlCard("Verification", "", html);
}

std::string FactsCard(const BenchReport& report) {
  std::string html = "<dl class=\"facts\">";
  for (const auto& [name, value] : report.facts.items()) {
    std::string label = name;
    std::replace(label.begin(), label.end(), '_', ' ');
    absl::StrAppend(&html, "<dt>", HtmlText(label), "</dt><dd>",
                    HtmlText(value.is_string() ? value.get<std::string>() : value.dump()), "</dd>");
  }
  return HtmlCard("Where and how", "", html + "</dl>");
}

}  // namespace

std::string BenchHtml(const BenchReport& report) {
  std::string html = absl::StrCat(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>",
      HtmlText(report.title), "</title>\n<style>", kStyle, ColorStyle(),
      "</style></head><body>\n<h1>", HtmlText(report.title),
      "</h1>\n<p class=\"soft\">logprobctl bench</p>\n");
  if (!report.loads.empty()) {
    html += Headline(report);
    html += WarningCard(report);
    html += VerificationCard(report);
    html +=
        HtmlCard("Results", "Latency of answered requests; in an open loop from the planned time.",
                 ResultTable(report));
    html += "<div class=\"grid\">";
    html += BenchPlots(report) + "</div>\n";
    html += HtmlCard("Server",
                     "Between the beginning and the end of measuring each load, from its metrics.",
                     ServerTable(report));
  }
  return html + FactsCard(report) + "</body></html>\n";
}

}  // namespace logprobd::client
