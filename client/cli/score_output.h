#pragma once

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "client/cpp/score.h"

namespace logprobd::client {

/// Writes one JSON object a row (row, target, then the outputs asked for), then one a segment.
/// NaN is written as null. Numbers read back to the same bits.
void WriteJsonLines(const ScoreArgs& args, const ScoreResult& result, std::ostream& out);

/// Writes each output asked for as `folder`/NAME.npy; creates the folder. Errors name the file.
absl::Status WriteNpyFiles(const ScoreArgs& args, const ScoreResult& result,
                           const std::string& folder);

}  // namespace logprobd::client
