#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace logprobd::client {

/// How hidden states travel.
enum class Transport {
  kTcp,           ///< In the request.
  kUnix,          ///< In the request, over a Unix socket.
  kSharedMemory,  ///< Through memory shared with a server on this host.
  kCudaIpc,       ///< Not at all: the server reads the client's GPU memory.
};

/// "tcp", "unix", "shm" or "cuda_ipc".
absl::string_view TransportName(Transport transport);

/// Which of them a client may use.
enum class TransportChoice {
  kAuto,          ///< The shortest way that can be had.
  kTcp,           ///< In the request, always.
  kSharedMemory,  ///< So or not at all.
  kCudaIpc,       ///< So or not at all.
};

/// "auto", "tcp", "shm" or "cuda-ipc"; else INVALID_ARGUMENT.
absl::StatusOr<TransportChoice> ParseTransportChoice(absl::string_view text);

/// Rows that lie in memory of a GPU of this host, contiguous, of the caller's process. What writes
/// them must have ended before the call (an event or a stream waited for), and they must stay as
/// they are until it ends.
struct DeviceRows {
  std::array<uint8_t, 16> device_uuid = {};  ///< cudaDeviceProp::uuid of the GPU.
  /// cudaIpcMemHandle_t of the allocation, from cudaIpcGetMemHandle. Memory of cudaMallocAsync and
  /// of virtual memory management has none.
  std::array<uint8_t, 64> handle = {};
  /// Of the first row in the allocation, in bytes: a multiple of 16, as the bytes of a row must be.
  int64_t offset = 0;
  int64_t bytes = 0;  ///< rows * hidden_size * size of dtype.
};

/// Memory for rows, from Client::AllocateRows. What of it is given as ScoreArgs::hidden is scored
/// where it lies. May outlive its Client.
class RowBuffer {
 public:
  RowBuffer() = default;
  RowBuffer(std::shared_ptr<void> owner, absl::Span<std::byte> bytes, bool is_shared)
      : owner_(std::move(owner)), bytes_(bytes), is_shared_(is_shared) {}
  RowBuffer(RowBuffer&&) = default;
  RowBuffer& operator=(RowBuffer&&) = default;

  /// Its content is arbitrary at first.
  absl::Span<std::byte> bytes() const { return bytes_; }
  /// False: ordinary memory, since none can be shared with the server.
  bool is_shared() const { return is_shared_; }

 private:
  std::shared_ptr<void> owner_;
  absl::Span<std::byte> bytes_;
  bool is_shared_ = false;
};

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

/// Where a request's time went on the server, in microseconds; the longest of its parts where the
/// call was cut.
struct ServerTimings {
  uint32_t queue_us = 0;
  uint32_t copy_us = 0;
  uint32_t engine_us = 0;
  uint32_t total_us = 0;
};

/// The scores, rows in the order given. Outputs not asked for are empty. Ignored rows hold zeros,
/// rows with NaN or Inf logits NaN (ids -1). Logprobs, entropies and lse are in nats.
struct ScoreResult {
  int64_t rows = 0;
  int64_t ignored_rows = 0;
  int64_t nonfinite_rows = 0;
  /// Version of the weights that scored every row; the highest of them where they were mixed.
  uint64_t weights_version = 0;
  /// All versions that scored rows, rising: several only with
  /// Client::Options::mix_weights_versions.
  std::vector<uint64_t> weights_versions;
  int32_t top_k = 0;

  std::vector<float> logprob;             ///< [rows]
  std::vector<float> entropy;             ///< [rows]
  std::vector<float> lse;                 ///< [rows]
  std::vector<int32_t> argmax_id;         ///< [rows]
  std::vector<float> argmax_logprob;      ///< [rows]
  std::vector<uint8_t> greedy;            ///< [rows], 1: the target is the argmax.
  std::vector<float> sum_p_squared;       ///< [rows]
  std::vector<float> max_logit;           ///< [rows], before temperature.
  std::vector<float> min_logit;           ///< [rows], before temperature.
  std::vector<int32_t> top_k_ids;         ///< [rows, top_k], best first.
  std::vector<float> top_k_logprobs;      ///< [rows, top_k]
  std::vector<float> candidate_logprobs;  ///< As ScoreArgs::candidate_ids.
  std::vector<double> segment_logprob;    ///< [segments]
  std::vector<uint32_t> segment_rows;     ///< [segments], rows scored, not ignored.
  std::vector<uint8_t> segment_greedy;    ///< [segments], 1: every scored row is greedy.

  /// How most of the rows travelled.
  Transport transport = Transport::kTcp;
  ServerTimings timings;
  int32_t requests = 0;  ///< Into which the call was cut.
  int32_t retries = 0;   ///< Requests sent again.
};

/// Checks what the client needs to cut and send without reading out of bounds: sizes that agree and
/// offsets that rise. Values (targets, temperatures, top_k) are the server's to judge.
/// INVALID_ARGUMENT names field, value and what it must be.
absl::Status CheckScoreArgs(const ScoreArgs& args);

}  // namespace logprobd::client
