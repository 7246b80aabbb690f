#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/weights/checkpoint.h"
#include "server/weights/head_config.h"
#include "server/weights/head_names.h"

namespace logprobd {

/// Which tensor of a checkpoint is the head, and why that may surprise.
struct HeadChoice {
  StoredTensor tensor;
  bool tied = false;
  std::vector<std::string> warnings;
};

/// Chooses the head: `head_tensor` where it is not empty, else by name and by what `config` says of
/// tied weights; rules in README.md. NOT_FOUND lists what was looked for; UNIMPLEMENTED for a
/// quantised head.
absl::StatusOr<HeadChoice> ChooseHead(Checkpoint& checkpoint, const HeadConfig& config,
                                      const HeadNameFilter& filter, const std::string& head_tensor);

}  // namespace logprobd
