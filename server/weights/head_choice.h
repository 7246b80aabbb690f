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

/// Chooses the head: `head_tensor` if it is not empty, otherwise by name, by the values that are
/// stored, and by what `config` says about tied weights. README.md lists the rules. If both a head
/// and an embedding are stored and the config says that they are one, reads the first `valid_vocab`
/// rows of both to compare them. Errors, whose messages say what to change:
///   INVALID_ARGUMENT  no tensor has the name of a head, and the message lists the names; or the
///                     stored tensors and the config contradict each other.
///   UNIMPLEMENTED     the head is quantised, has an adapter, or is stored in an unknown form.
absl::StatusOr<HeadChoice> ChooseHead(Checkpoint& checkpoint, const HeadConfig& config,
                                      const HeadNames& names, const std::string& head_tensor,
                                      std::optional<int64_t> valid_vocab);

/// A head's bias, which is empty if there is none, with warnings about unexpected settings.
struct HeadBias {
  std::vector<float> values;      ///< The values in fp32.
  std::vector<std::byte> stored;  ///< The same values as stored in the file.
  std::optional<StoredTensor> tensor;
  std::vector<std::string> warnings;
};

/// Reads the bias of the head `weight_name`, which has `rows` rows: its sibling "x.bias", for a
/// tied embedding also the bias of a head such as "lm_head.bias", or final_logits_bias, whose zeros
/// count as no bias. Returns INVALID_ARGUMENT if config.json requires a bias that is missing or if
/// its shape does not fit, or there are two, and UNIMPLEMENTED if it is not
/// BF16, F16 or F32.
absl::StatusOr<HeadBias> ReadHeadBias(Checkpoint& checkpoint, const HeadConfig& config,
                                      const HeadNames& names, const std::string& weight_name,
                                      int64_t rows);

}  // namespace logprobd
