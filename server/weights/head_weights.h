#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"
#include "server/weights/allowed_roots.h"

namespace logprobd {

/// Most valid ids of a head: the kernels' fixed-point sums hold no more.
inline constexpr int64_t kVocabSizeMax = int64_t{1} << 20;

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

  /// The bias as it is stored, or empty.
  virtual absl::Span<const std::byte> stored_bias() const {
    return {reinterpret_cast<const std::byte*>(bias().data()), bias().size() * sizeof(float)};
  }
};

/// How to find the head in a model folder; the defaults suit a Hugging Face checkpoint.
struct ModelFolderOptions {
  std::string head_name = "default";  ///< Name under which it is served.
  std::string head_tensor = "";       ///< Tensor to use; empty: resolved by name and config.
  std::optional<int64_t> valid_vocab = std::nullopt;  ///< Rows at or beyond it take no part.
  bool include_padding = false;                       ///< All rows of the tensor take part.
  uint64_t weights_version = 1;
  /// Where all files must lie; null: anywhere.
  std::shared_ptr<const AllowedRoots> roots = nullptr;
};

/// A head that lies in a model folder, and what is worth telling about how it was found.
struct ModelFolderHead {
  std::unique_ptr<HeadWeights> weights;
  std::vector<std::string> warnings;
};

/// Opens a folder with config.json and safetensors (single or indexed), or one .safetensors file
/// with config.json beside it (also an index file). Reads headers and the bias only; where a model
/// that says it is tied stores two tensors, also pieces of these, 2 MiB at most, to warn if they
/// differ. Rules: README.md of this folder. Errors say what to change: NOT_FOUND (no such folder,
/// file or tensor), INVALID_ARGUMENT (malformed or contradictory), UNIMPLEMENTED (quantised head,
/// pickle files), PERMISSION_DENIED (a path that leaves the folder or `roots`, a file that may not
/// be read), DATA_LOSS (a file that cannot be read).
absl::StatusOr<ModelFolderHead> OpenModelFolder(const std::string& path,
                                                const ModelFolderOptions& options);

/// One line for people: "qwen3: hidden 1024, vocab 151936 of 151936 rows, model.embed_tokens.weight
/// (tied), bf16, scale 1, no cap, no bias, 296.8 MiB".
std::string DescribeHead(const HeadInfo& head);

}  // namespace logprobd
