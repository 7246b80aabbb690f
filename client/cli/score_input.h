#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/tensor_files/tensor.h"
#include "client/cpp/score.h"

namespace logprobd::client {

/// Where `logprobctl score` finds its arrays. A file is .npy, .safetensors (":name" behind the path
/// picks a tensor) or, for integers and numbers, text separated by space, comma or newline.
struct ScoreFiles {
  std::string input;   ///< .safetensors with both hidden and targets; or
  std::string hidden;  ///< a file for each.
  std::string targets;
  std::string hidden_name = "hidden";
  std::string targets_name = "targets";
  std::string dtype;  ///< What uint16 data holds: "bf16" or "f16"; empty: the file says.
  std::string row_temperatures;
  std::vector<int32_t> candidates;  ///< Scored on every row.
  std::string candidate_ids;        ///< [rows, k], or [n] with candidate_offsets.
  std::string candidate_offsets;
  std::string segments;  ///< Offsets, [segments + 1].
};

/// The arrays of a call, and the arguments that refer to them. Not copyable: the arguments would
/// refer to the original.
class ScoreInput {
 public:
  /// INVALID_ARGUMENT or NOT_FOUND names file and fault.
  static absl::StatusOr<std::unique_ptr<ScoreInput>> Load(const ScoreFiles& files);
  ScoreInput(const ScoreInput&) = delete;
  ScoreInput& operator=(const ScoreInput&) = delete;

  /// Filled in: everything that comes from files.
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

}  // namespace logprobd::client
