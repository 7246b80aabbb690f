#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/weights/checkpoint.h"
#include "server/weights/head_config.h"

namespace logprobd {

/// The bias that belongs to the head `weight_name` of `rows` rows, in fp32, or empty when there is
/// none: the sibling "x.bias", for a tied head also "lm_head.bias". Appends to `warnings`.
/// INVALID_ARGUMENT when config.json asks for a bias that is missing, or its shape does not fit;
/// UNIMPLEMENTED when it is none of BF16, F16, F32.
absl::StatusOr<std::vector<float>> ReadHeadBias(Checkpoint& checkpoint, const HeadConfig& config,
                                                const std::string& weight_name, int64_t rows,
                                                std::vector<std::string>& warnings);

}  // namespace logprobd
