#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd {

/// Element type of hidden states and of a head's weight, with the values of proto Dtype.
enum class Dtype : int32_t { kBf16 = 1, kF16 = 2, kF32 = 3 };

constexpr int64_t DtypeBytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

constexpr absl::string_view DtypeName(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return "bf16";
    case Dtype::kF16:
      return "f16";
    case Dtype::kF32:
      return "f32";
  }
  return "unknown";
}

/// Limits of a request. A request above one of them fails with INVALID_ARGUMENT, however small the
/// load is.
struct RequestLimits {
  /// Maximum number of rows of a request or of a stream chunk, >= 1.
  int64_t request_rows_max = 65'536;
  /// Maximum size of a message in bytes.
  int64_t message_bytes_max = int64_t{64} << 20;
  int32_t top_k_max = 128;  ///< Maximum top_k.
  /// Maximum number of candidate ids of a request.
  int64_t candidates_max = 1 << 20;
  int64_t segments_max = 65'536;  ///< Maximum number of segments of a request.
  /// Maximum number of chunks of one stream that may wait for their answers.
  int32_t stream_window = 8;
};

/// A part of a head's vocabulary and the device that holds it.
struct ShardPlace {
  int32_t replica = 0;  ///< Index of the replica, which holds one whole head.
  int32_t shard = 0;    ///< Index of the shard, in the order of the vocabulary.
  std::string device;   ///< For example "gpu0" or "cpu".
  /// Half-open range of the valid ids that the shard scores; it begins on a tile boundary.
  int64_t vocab_begin = 0;
  int64_t vocab_end = 0;
};

/// Describes a served head. Requests are validated against it, and ListHeads reports it.
struct HeadInfo {
  std::string name;
  std::string model_type;
  std::string tensor;  ///< Name of the head's tensor in the checkpoint.
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;  ///< Number of valid ids; targets are in [0, vocab_size).
  int64_t vocab_rows = 0;  ///< Number of rows of the weight including padding, >= vocab_size.
  Dtype dtype = Dtype::kBf16;
  bool tied = false;
  bool has_bias = false;
  float scale = 1.0F;    ///< z = cap(scale * (h . w) + bias).
  float softcap = 0.0F;  ///< 0 means no cap.
  int64_t weight_bytes = 0;
  uint64_t weights_version = 1;
  std::string engine;         ///< For example "cuda/chunked".
  std::string engine_reason;  ///< Reason for which this engine was chosen.
  /// Shards of all replicas, ordered by replica, then by shard; empty before an engine is planned.
  std::vector<ShardPlace> layout;
  RequestLimits limits;
  /// What is surprising about how the head was found in its files, for the operator.
  std::vector<std::string> warnings;
};

/// Memory of one kind that is reserved in one place; used by the plan, the log and the metrics.
struct MemoryUse {
  std::string place;  ///< "host", or a GPU such as "gpu0".
  std::string kind;   ///< "weights", "workspace", "staging", "receive", "shared".
  int64_t bytes = 0;
  bool is_pinned = false;  ///< True for page-locked host memory, from which a GPU can copy.
};

using MemoryPlan = std::vector<MemoryUse>;

/// Returns the name of a GPU in ShardPlace::device and MemoryUse::place: "gpu3" for CUDA ordinal 3.
std::string GpuName(int32_t ordinal);

/// Returns the CUDA ordinal of a GPU's name, or nullopt if `name` is not the name of a GPU.
std::optional<int32_t> GpuOrdinal(absl::string_view name);

/// Returns the CUDA ordinals of the GPUs in `places`, each once, in order of first use.
std::vector<int32_t> GpusOf(absl::Span<const ShardPlace> places);

/// Returns whether kernels of one GPU wait for kernels of another, as in a head with several shards
/// on GPUs. Returns false for CPU shards: they are threads, and the system lets all of them run.
bool WaitsForPeers(absl::Span<const ShardPlace> places);

}  // namespace logprobd
