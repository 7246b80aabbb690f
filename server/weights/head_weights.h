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
#include "server/weights/head_config.h"

namespace logprobd {

/// Maximum number of valid ids of a head, which is the range of the kernels' fixed-point sums.
inline constexpr int64_t kVocabSizeMax = int64_t{1} << 20;

/// A head's weight before an engine loads it: a description, and rows that are read on demand.
/// Thread-safe.
class HeadWeights {
 public:
  virtual ~HeadWeights() = default;

  /// Returns the description of the head, except the members that an engine sets (engine,
  /// engine_reason, limits).
  virtual const HeadInfo& info() const = 0;

  /// Reads rows [row_begin, row_end) of the weight, in their stored dtype info().dtype, to `out`.
  /// Rows in `out` are `row_pitch_bytes` apart (>= hidden_size * DtypeBytes). Reads nothing else of
  /// the checkpoint. Returns OUT_OF_RANGE if the rows do not exist, and DATA_LOSS if the file or a
  /// row has changed since it was read first, or cannot be read.
  virtual absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                                int64_t row_pitch_bytes) const = 0;

  /// Returns the bias in fp32, [vocab_rows], or an empty vector if there is none.
  virtual const std::vector<float>& bias() const = 0;

  /// Returns the bytes of the bias as stored, or an empty span if there is none.
  virtual absl::Span<const std::byte> stored_bias() const {
    return {reinterpret_cast<const std::byte*>(bias().data()), bias().size() * sizeof(float)};
  }

  /// Returns the host memory that the rows themselves occupy, in bytes; 0 if they are in a file.
  virtual int64_t memory_bytes() const { return 0; }
};

/// Options for finding the head in a model folder. The defaults suit a Hugging Face checkpoint.
struct ModelFolderOptions {
  std::string head_name = "default";  ///< Name under which the head is served.
  std::string head_tensor = "";       ///< Tensor to use, or empty to choose by name and config.
  std::optional<int64_t> valid_vocab = std::nullopt;  ///< Number of leading rows to use.
  bool include_padding = false;                       ///< Use all rows of the tensor.
  LogitOverrides logits = {};                         ///< What to believe instead of config.json.
  uint64_t weights_version = 1;
  /// Folders that must contain all files, or null for no restriction.
  std::shared_ptr<const AllowedRoots> roots = nullptr;
};

struct HeadSource;  // head_source.h

/// A head in a model folder, with warnings for the operator about how it was found.
struct ModelFolderHead {
  std::unique_ptr<HeadWeights> weights;
  std::vector<std::string> warnings;
  std::shared_ptr<const HeadSource> source = nullptr;  ///< Where OpenModelFolder found the head.
};

/// Opens a folder with config.json and safetensors (single or indexed), or one .safetensors or
/// index file with config.json in the same folder. Reads only headers and the bias; if a model that
/// claims tied weights stores two tensors, also reads their valid rows to compare them. README.md
/// of this folder lists the rules. Error messages say what to change:
///   NOT_FOUND          no such folder or file.
///   INVALID_ARGUMENT   malformed files or options, or config.json and tensors that contradict each
///                      other.
///   UNIMPLEMENTED      a quantised head, one in an unknown form, logits that are computed in an
///                      unknown way, or pickle files.
///   PERMISSION_DENIED  a path leaves the folder or `roots`, or a file is not readable.
///   DATA_LOSS          reading a file failed.
absl::StatusOr<ModelFolderHead> OpenModelFolder(const std::string& path,
                                                const ModelFolderOptions& options);

/// Returns a description of the head in one line: "qwen3: hidden 1024, vocab 151936 of 151936 rows,
/// model.embed_tokens.weight (tied), bf16, scale 1, no cap, no bias, 296.8 MiB".
std::string DescribeHead(const HeadInfo& head);

}  // namespace logprobd
