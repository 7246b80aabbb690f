#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/weights/checkpoint.h"
#include "server/weights/head_config.h"

namespace logprobd {

/// A head's bias in fp32, empty when there is none, and what may surprise about it.
struct HeadBias {
  std::vector<float> values;
  std::vector<std::byte> stored;  ///< The same as it lies in the file.
  std::vector<std::string> warnings;
};

/// The bias that belongs to the head `weight_name` of `rows` rows: the sibling "x.bias", for a tied
/// head also "lm_head.bias".
/// INVALID_ARGUMENT when config.json asks for a bias that is missing, or its shape does not fit;
/// UNIMPLEMENTED when it is none of BF16, F16, F32.
absl::StatusOr<HeadBias> ReadHeadBias(Checkpoint& checkpoint, const HeadConfig& config,
                                      const std::string& weight_name, int64_t rows);

}  // namespace logprobd
