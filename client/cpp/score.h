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
#include "client/cpp/score_columns.h"

namespace logprobd::client {

/// Transport of a request's hidden states to the server.
enum class Transport {
  kTcp,           ///< In the request.
  kUnix,          ///< In the request, over a Unix socket.
  kSharedMemory,  ///< Through memory shared with a same-host server.
  kCudaIpc,       ///< The server reads the client's GPU memory; nothing is sent.
};

/// Returns "tcp", "unix", "shm" or "cuda_ipc".
absl::string_view TransportName(Transport transport);

/// The transports that a client may use.
enum class TransportChoice {
  kAuto,          ///< The fastest transport that is available.
  kTcp,           ///< Always in the request.
  kSharedMemory,  ///< Only shared memory; calls fail if it is not available.
  kCudaIpc,       ///< Only GPU memory; calls fail if it is not available.
};

/// Parses "auto", "tcp", "shm" or "cuda-ipc". Returns INVALID_ARGUMENT for other text.
absl::StatusOr<TransportChoice> ParseTransportChoice(absl::string_view text);

/// Contiguous rows in memory of a GPU of this host, allocated by the calling process. The caller
/// must wait for the kernels that write them before the call, and must not change them until the
/// call ends.
struct DeviceRows {
  std::array<uint8_t, 16> device_uuid = {};  ///< cudaDeviceProp::uuid of the GPU.
  /// cudaIpcMemHandle_t of the allocation, from cudaIpcGetMemHandle. Memory from cudaMallocAsync
  /// and from the virtual memory API has no such handle.
  std::array<uint8_t, 64> handle = {};
  /// Bytes from the start of the allocation to the first row; a multiple of 16. The bytes per row
  /// must be a multiple of 16 too.
  int64_t offset = 0;
  int64_t bytes = 0;  ///< rows * hidden_size * size of dtype.
};

/// Memory for rows, from Client::AllocateRows. Rows that ScoreArgs::hidden refers to in this memory
/// are scored without a copy. The buffer may outlive its Client.
class RowBuffer {
 public:
  RowBuffer() = default;
  RowBuffer(std::shared_ptr<void> owner, absl::Span<std::byte> bytes, bool is_shared)
      : owner_(std::move(owner)), bytes_(bytes), is_shared_(is_shared) {}
  RowBuffer(RowBuffer&&) = default;
  RowBuffer& operator=(RowBuffer&&) = default;

  /// Returns the memory, which is uninitialised at first.
  absl::Span<std::byte> bytes() const { return bytes_; }
  /// Returns false if this is ordinary memory, because none can be shared with the server.
  bool is_shared() const { return is_shared_; }

 private:
  std::shared_ptr<void> owner_;
  absl::Span<std::byte> bytes_;
  bool is_shared_ = false;
};

/// Element type of hidden states. The values equal those of the wire format.
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

enum class Priority : int32_t { kHigh = 1, kNormal = 2, kLow = 3 };

/// The rows to score and the requested scores. All memory belongs to the caller and must stay valid
/// and unchanged until the call ends (Score returns, or the callback of ScoreAsync is called).
struct ScoreArgs {
  /// The states after the model's final norm: `dtype` [rows, hidden_size], row-major,
  /// little-endian, with any alignment. Over a socket they are sent from this memory. For a
  /// same-host server they are copied once into shared memory, or not at all if they lie in a
  /// RowBuffer.
  absl::Span<const std::byte> hidden;
  Dtype dtype = Dtype::kBf16;
  /// The same rows in a GPU's memory, instead of or in addition to `hidden`. If the server cannot
  /// read them there, `hidden` is sent; without `hidden` the call ends with INVALID_ARGUMENT.
  std::optional<DeviceRows> device_rows;
  int64_t rows = 0;         ///< 0 to 2^40: the client splits large calls.
  int64_t hidden_size = 0;  ///< Must equal the head's hidden size.

  /// [rows], each in [0, vocab) or ignore_index: the token that follows each row.
  absl::Span<const int32_t> targets;
  /// Temperature that divides the logits, 1e-4 to 1e4.
  float temperature = 1.0F;
  /// Temperature of each row, [rows], instead of `temperature`; empty if not used. That of an
  /// ignored row may be anything.
  absl::Span<const float> row_temperatures;
  /// Temperature of the entropy alone. If absent, the row's temperature applies.
  std::optional<float> entropy_temperature;
  /// Target of rows that are not scored and get zeros; must lie outside [0, vocab).
  int32_t ignore_index = -100;

  uint32_t outputs = output::kDefault;  ///< Sum of output:: bits; 0 means kDefault.
  int32_t top_k = 0;                    ///< Number of best ids to return per row; may be 0.
  /// Further ids to score: row r owns [candidate_offsets[r], candidate_offsets[r + 1]).
  absl::Span<const int32_t> candidate_ids;
  absl::Span<const int64_t> candidate_offsets;  ///< [rows + 1], ascending from 0; or empty.
  /// [segments + 1], ascending from 0 to `rows`: consecutive rows to sum; empty if not used.
  absl::Span<const int64_t> segment_offsets;

  std::string head;  ///< Empty means the server's only head.
  /// Version of the weights to score with; 0 means the live version. A call mixes versions only
  /// with Client::Options::mix_weights_versions.
  uint64_t weights_version = 0;
  Priority priority = Priority::kNormal;
  /// Fails the call with INVALID_ARGUMENT when a row's logits hold NaN or Inf, instead of returning
  /// NaN for that row.
  bool reject_nonfinite = false;
  std::string request_id;  ///< Appears in the server's log; at most 128 bytes.
  /// W3C traceparent of the caller's span, at most 256 printable ASCII characters; empty if the
  /// call belongs to no trace. The server's log names the trace of a request that fails, and the
  /// server ignores text that is not a valid traceparent.
  std::string traceparent;
  /// Fills ScoreResult::traces.
  bool trace = false;

  /// Time limit of the whole call, including retries. If absent, Client::Options::timeout applies.
  std::optional<absl::Duration> timeout;
  /// Called with the number of rows scored so far, by one thread at a time: a thread of the library
  /// or, in a blocking call, the caller's own. It must return quickly.
  std::function<void(int64_t rows_done)> on_progress;
};

/// Time that a request spent in the server's stages, in microseconds. For a call that was split,
/// each value is the maximum over its requests.
struct ServerTimings {
  uint32_t queue_us = 0;
  uint32_t copy_us = 0;
  uint32_t engine_us = 0;
  uint32_t total_us = 0;
};

/// A stage of a RequestTrace, from RequestTrace::received on.
struct StageTrace {
  absl::Duration begin = {};
  absl::Duration end = {};  ///< >= begin.
};

/// When a request passed the stages of the server, to be drawn as spans of the caller's trace. The
/// proto message Trace describes the stages: for a request whose rows the server scored in one
/// batch they follow each other without a gap; for one in several batches, queue, copy and engine
/// reach from the first to the last batch, and overlap.
struct RequestTrace {
  std::string traceparent = {};  ///< The one that counted; empty if the call had no valid one.
  absl::Time received = {};      ///< When the server had the message, by its host's wall clock.
  StageTrace receive = {};
  StageTrace queue = {};
  std::optional<StageTrace> copy = {};    ///< Absent if all rows are ignored.
  std::optional<StageTrace> engine = {};  ///< Absent if all rows are ignored.
  absl::Duration kernel = {};             ///< Time of the kernels, summed over the batches.
  StageTrace reply = {};
};

/// The scores of a call, in the order of its rows. Outputs that were not requested are empty.
/// Ignored rows hold zeros; rows with NaN or Inf logits hold NaN, and -1 as ids
/// and ranks. Logprobs,
/// entropies and lse are in nats.
struct ScoreResult : ScoreColumns {
  int64_t rows = 0;
  int64_t ignored_rows = 0;    ///< Rows whose target is ignore_index.
  int64_t nonfinite_rows = 0;  ///< Rows whose logits hold NaN or Inf.
  /// Version of the weights that scored the rows; the highest one if versions were mixed.
  uint64_t weights_version = 0;
  /// All versions that scored rows, in ascending order; more than one only with
  /// Client::Options::mix_weights_versions.
  std::vector<uint64_t> weights_versions;
  int32_t top_k = 0;

  Transport transport = Transport::kTcp;  ///< The transport of most rows.
  ServerTimings timings;
  /// With ScoreArgs::trace, one for each request into which the call was split, in the order of its
  /// rows. Servers that do not know traces give none.
  std::vector<RequestTrace> traces;
  int32_t requests = 0;  ///< Number of requests into which the call was split.
  int32_t retries = 0;   ///< Number of requests that were sent again.
};

/// Checks that sizes agree and offsets do not decrease, so that splitting and sending never read
/// out of bounds. The server checks the values (targets, temperatures, top_k). Client::Score calls
/// this. Returns INVALID_ARGUMENT with the field, its value and the allowed values.
absl::Status CheckScoreArgs(const ScoreArgs& args);

}  // namespace logprobd::client
