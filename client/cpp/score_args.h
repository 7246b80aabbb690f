#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/same_host.h"

namespace logprobd::client {

/// Element type of hidden states. Values are those of the wire.
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

/// Bits of ScoreArgs::outputs; top-k, candidates and segments are asked by their own fields.
namespace output {
inline constexpr uint32_t kLogprob = 1;
inline constexpr uint32_t kEntropy = 2;
inline constexpr uint32_t kLse = 4;
inline constexpr uint32_t kArgmax = 8;  ///< Id and logprob.
inline constexpr uint32_t kGreedy = 16;
inline constexpr uint32_t kSumPSquared = 32;
inline constexpr uint32_t kMaxLogit = 64;
inline constexpr uint32_t kMinLogit = 128;
inline constexpr uint32_t kDefault = kLogprob | kEntropy;
}  // namespace output

enum class Priority : int32_t { kHigh = 1, kNormal = 2, kLow = 3 };

/// What to score. All memory stays the caller's and must be valid and unchanged until the call
/// ends (Score returns, or the callback of ScoreAsync is called).
struct ScoreArgs {
  /// `dtype` [rows, hidden_size], row-major, little-endian; any alignment. Over a socket it is sent
  /// from where it lies; for a server on this host it is copied once into memory shared with it,
  /// or, where it lies in a RowBuffer, not at all.
  absl::Span<const std::byte> hidden;
  Dtype dtype = Dtype::kBf16;
  /// Instead of `hidden`, or beside it: the same rows in a GPU's memory. Where the server cannot
  /// read them there, `hidden` is sent; without it the call ends with INVALID_ARGUMENT.
  std::optional<DeviceRows> device_rows;
  int64_t rows = 0;         ///< >= 0, without an upper limit: the client cuts.
  int64_t hidden_size = 0;  ///< Must be the head's.

  /// [rows], each in [0, vocab) or ignore_index.
  absl::Span<const int32_t> targets;
  /// Logits are divided by it, 1e-4 to 1e4.
  float temperature = 1.0F;
  /// [rows], or empty; instead of `temperature`.
  absl::Span<const float> row_temperatures;
  /// Temperature of the entropy alone. Absent: the row's.
  std::optional<float> entropy_temperature;
  /// Rows with this target get zeros; must lie outside [0, vocab).
  int32_t ignore_index = -100;

  uint32_t outputs = output::kDefault;  ///< Sum of output:: bits; 0: the default.
  int32_t top_k = 0;                    ///< Best ids of each row, 0: none.
  /// Further ids to score: row r owns [candidate_offsets[r], candidate_offsets[r + 1]).
  absl::Span<const int32_t> candidate_ids;
  absl::Span<const int64_t> candidate_offsets;  ///< [rows + 1] from 0, or empty: none.
  /// [segments + 1] from 0 to `rows`, never falling: rows summed together; empty: none.
  absl::Span<const int64_t> segment_offsets;

  std::string head;  ///< Empty: the server's only head.
  /// Version of the weights to score with; 0: whichever is live. A call mixes versions only with
  /// Client::Options::mix_weights_versions.
  uint64_t weights_version = 0;
  Priority priority = Priority::kNormal;
  /// INVALID_ARGUMENT when a row's logits hold NaN or Inf, instead of NaN for that row.
  bool reject_nonfinite = false;
  std::string request_id;  ///< For the server's log, at most 128 bytes.

  /// Limit of the whole call, retries included. Absent: Client::Options::timeout.
  std::optional<absl::Duration> timeout;
  /// Called with the rows scored so far, one at a time, from the library's threads or, in a
  /// blocking call, from the caller's own; must be quick.
  std::function<void(int64_t rows_done)> on_progress;
};

}  // namespace logprobd::client
