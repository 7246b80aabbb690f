#pragma once

#include <string>
#include <vector>

#include "client/cli/bench/bench_report.h"

namespace logprobd::client {

/// The figures of reports for people, as text: one list for the terminal and the page.

/// Column names of FigureCells.
std::vector<std::string> FigureHeader(const BenchReport& report);
/// Requests, throughput and latencies in milliseconds of a load, or of one size of its mix.
std::vector<std::string> FigureCells(const BenchReport& report, const BenchLoad& load,
                                     const SizeStats& stats);

/// Column names of ServerCells.
std::vector<std::string> ServerHeader();
std::vector<std::string> ServerCells(const ServerFigures& server);

}  // namespace logprobd::client
