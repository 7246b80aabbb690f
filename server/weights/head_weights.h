#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/head_info.h"

namespace logprobd {

/// A head's weight before it lies in an engine: facts, and rows read on demand. Thread-safe.
class HeadWeights {
 public:
  virtual ~HeadWeights() = default;

  /// Everything but what an engine adds (engine, engine_reason, limits).
  virtual const HeadInfo& info() const = 0;

  /// Reads rows [row_begin, row_end) of the weight as stored (info().dtype, row-major) to `out`,
  /// rows `row_pitch_bytes` apart (>= hidden_size * DtypeBytes). Reads nothing else of the
  /// checkpoint. Errors: OUT_OF_RANGE, or DATA_LOSS when the file has changed or cannot be read.
  virtual absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                                int64_t row_pitch_bytes) const = 0;

  /// The bias in fp32, [vocab_rows], or empty.
  virtual const std::vector<float>& bias() const = 0;
};

/// How to find the head in a model folder; the defaults suit a Hugging Face checkpoint.
struct ModelFolderOptions {
  std::string head_name = "default";   ///< Name under which it is served.
  std::string head_tensor;             ///< Tensor to use; empty: resolved by name and config.
  std::optional<int64_t> valid_vocab;  ///< Rows at or beyond it take no part.
  bool include_padding = false;        ///< All rows of the tensor take part.
  uint64_t weights_version = 1;
};

/// A head that lies in a model folder, and what is worth telling about how it was found.
struct ModelFolderHead {
  std::unique_ptr<HeadWeights> weights;
  std::vector<std::string> warnings;
};

/// Opens a folder with config.json and safetensors (single or indexed), or one .safetensors file
/// with config.json beside it. Reads headers only. Rules: README.md of this folder. Errors say what
/// to change: NOT_FOUND (no such folder, file or tensor), INVALID_ARGUMENT (malformed or
/// contradictory), UNIMPLEMENTED (quantised head, pickle files), PERMISSION_DENIED (a path that
/// leaves the folder).
absl::StatusOr<ModelFolderHead> OpenModelFolder(const std::string& path,
                                                const ModelFolderOptions& options);

}  // namespace logprobd
