#pragma once

#include <string>

#include "client/cli/bench/bench_report.h"

namespace logprobd::client {

/// The report as one HTML page with inline plots: nothing is loaded from elsewhere and nothing runs
/// in it. Readable on a phone, in light and dark.
std::string BenchHtml(const BenchReport& report);

}  // namespace logprobd::client
