#pragma once

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/tensor_files/tensor.h"
#include "client/cpp/score.h"

namespace logprobd::client {

/// Paths of the input files of `logprobctl score`. A file is .npy, .safetensors (":name" after the
/// path selects a tensor) or, for offsets and temperatures, text with numbers that are separated by
/// spaces, commas or newlines.
struct ScoreFiles {
  std::string input;    ///< One .safetensors file with hidden states and targets, or empty.
  std::string hidden;   ///< File with the hidden states, if `input` is empty.
  std::string targets;  ///< File with the targets, if `input` is empty.
  std::string hidden_name = "hidden";
  std::string targets_name = "targets";
  /// Type of the hidden states. If the file stores uint16, "bf16" or "f16" is required; otherwise
  /// the type is that of the file, and `dtype` is empty or equal to it.
  std::string dtype;
  std::string row_temperatures;
  std::vector<int32_t> candidates;  ///< Token ids to score on every row.
  std::string candidate_ids;        ///< [rows, k], or [n] with candidate_offsets.
  std::string candidate_offsets;    ///< [rows + 1]
  std::string segments;             ///< Offsets, [segments + 1].
};

/// The arrays of a call and the arguments that point into them. Not copyable, since a copy's
/// arguments would point into the original.
class ScoreInput {
 public:
  /// Returns INVALID_ARGUMENT or NOT_FOUND with the file's name and the reason.
  static absl::StatusOr<std::unique_ptr<ScoreInput>> Load(const ScoreFiles& files);
  ScoreInput(const ScoreInput&) = delete;
  ScoreInput& operator=(const ScoreInput&) = delete;

  /// Returns the arguments, in which every array that comes from a file is set.
  ScoreArgs& args() { return args_; }

 private:
  ScoreInput() = default;
  absl::Status LoadHidden(const ScoreFiles& files);
  absl::Status LoadTargets(const ScoreFiles& files);
  absl::Status LoadCandidates(const ScoreFiles& files);
  absl::Status LoadRest(const ScoreFiles& files);

  Tensor hidden_;
  std::vector<int32_t> targets_;
  std::vector<float> row_temperatures_;
  std::vector<int32_t> candidate_ids_;
  std::vector<int64_t> candidate_offsets_;
  std::vector<int64_t> segment_offsets_;
  ScoreArgs args_;
};

/// Writes one JSON object per row (row, target, then the requested outputs), one per segment, and
/// one per RequestTrace.
/// NaN and infinities are written as null. Numbers read back to the same bits.
void WriteJsonLines(const ScoreArgs& args, const ScoreResult& result, std::ostream& out);

/// Writes each requested output as `folder`/NAME.npy and creates the folder. Errors name the file.
absl::Status WriteNpyFiles(const ScoreArgs& args, const ScoreResult& result,
                           const std::string& folder);

}  // namespace logprobd::client
