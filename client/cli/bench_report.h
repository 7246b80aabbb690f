#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/load_generator.h"
#include "nlohmann/json.hpp"

namespace logprobd::client {

/// The results as a table: one line a result, times in milliseconds.
void PrintBenchTable(const std::vector<LoadResult>& results, std::ostream& out);

/// The results as CSV with a header, times in seconds.
std::string BenchCsv(const std::vector<LoadResult>& results);

/// `facts` (address, head, dtype, ...) and the results, times in seconds.
nlohmann::ordered_json BenchJson(const nlohmann::ordered_json& facts,
                                 const std::vector<LoadResult>& results);

/// Writes CSV or JSON by the path's extension. INVALID_ARGUMENT for another one or a path that
/// cannot be written.
absl::Status ExportBench(const std::string& path, const nlohmann::ordered_json& facts,
                         const std::vector<LoadResult>& results);

/// Whether ExportBench knows the extension.
bool IsExportPath(const std::string& path);

}  // namespace logprobd::client
