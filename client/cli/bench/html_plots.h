#pragma once

#include <string>

#include "client/cli/bench/bench_report.h"

namespace logprobd::client {

/// A part of the page with a heading and, unless it is empty, a note; "" without content.
std::string HtmlCard(const std::string& title, const std::string& note, const std::string& content);

/// The report's plots, a card each: throughput and latency against load (of a single load over
/// time), latency by percentile and as a histogram, and the server's stages where they are known.
std::string BenchPlots(const BenchReport& report);

}  // namespace logprobd::client
