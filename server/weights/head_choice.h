#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/weights/checkpoint.h"
#include "server/weights/head_config.h"
#include "server/weights/head_names.h"

namespace logprobd {

/// The tensor of a checkpoint that is the head, with warnings about surprising choices.
struct HeadChoice {
  StoredTensor tensor;
  bool tied = false;
  std::vector<std::string> warnings;
};

/// Chooses the head: `head_tensor` if it is not empty, otherwise by name and by what `config` says
/// about tied weights. README.md lists the rules. Returns NOT_FOUND, which lists the names that
/// were tried, if there is no head, and UNIMPLEMENTED if the head is quantised.
absl::StatusOr<HeadChoice> ChooseHead(Checkpoint& checkpoint, const HeadConfig& config,
                                      const HeadNameFilter& filter, const std::string& head_tensor);

/// A head's bias, which is empty if there is none, with warnings about unexpected settings.
struct HeadBias {
  std::vector<float> values;      ///< The values in fp32.
  std::vector<std::byte> stored;  ///< The same values as stored in the file.
  std::optional<StoredTensor> tensor;
  std::vector<std::string> warnings;
};

/// Reads the bias of the head `weight_name`, which has `rows` rows: its sibling "x.bias" or, for a
/// tied embedding, also the bias of a head such as "lm_head.bias". Returns INVALID_ARGUMENT if
/// config.json requires a bias that is missing or if its shape does not fit, and UNIMPLEMENTED if
/// it is not BF16, F16 or F32.
absl::StatusOr<HeadBias> ReadHeadBias(Checkpoint& checkpoint, const HeadConfig& config,
                                      const std::string& weight_name, int64_t rows);

}  // namespace logprobd
