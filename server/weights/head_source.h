#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/weights/checkpoint.h"
#include "server/weights/regular_file.h"

namespace logprobd {

/// The open files in which a head was found, and its tensors as they are stored. Export copies
/// them.
struct HeadSource {
  std::string folder;
  std::string config;  ///< The text of config.json.
  /// config.json, the index if there is one, and the files of the weight and the bias, each once.
  std::vector<std::shared_ptr<RegularFile>> files;
  StoredTensor weight;
  std::optional<StoredTensor> bias;  ///< Set if the bias is used.
};

}  // namespace logprobd
