#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"
#include "server/base/outputs.h"
#include "server/base/trace_context.h"

namespace logprobd {

/// Id of a region of shared memory or of a lease: 16 random bytes, which nobody can guess.
using RandomId = std::array<uint8_t, 16>;

/// A parsed proto SharedMemorySlice: rows in a region that the client shares with the server. The
/// offset is aligned, and offset + bytes is below 2^63.
struct SharedMemorySlice {
  RandomId region = {};
  int64_t offset = 0;
  int64_t bytes = 0;
};

/// The fields of a parsed proto CudaIpcSlice without the lease: rows in a GPU's memory. The offset
/// is aligned, and offset + bytes is below 2^63.
struct DeviceSlice {
  std::array<uint8_t, 16> device_uuid = {};
  std::array<uint8_t, 64> handle = {};
  int64_t offset = 0;
  int64_t bytes = 0;
};

/// A parsed proto CudaIpcSlice.
struct CudaIpcSlice {
  RandomId lease = {};
  DeviceSlice memory;
};

enum class Priority : int32_t { kHigh = 0, kNormal = 1, kLow = 2 };
inline constexpr int kNumPriorities = 3;

inline constexpr int32_t kDefaultIgnoreIndex = -100;

/// Location of the memory of hidden states.
enum class PayloadPlace {
  kMessage,       ///< In the slices of the request's message.
  kSharedMemory,  ///< In a region shared with the client, which can write to it at any time.
  kDevice,        ///< In the client's memory on GPU `gpu`, which the host cannot read.
};

/// The hidden states of a request, in the pieces in which they arrived. Nothing is copied until a
/// batch is formed.
struct HiddenPayload {
  std::vector<absl::Span<const std::byte>> pieces;  ///< One piece unless `place` is kMessage.
  int64_t bytes = 0;                                ///< Total size of the pieces.
  std::shared_ptr<void> owner;                      ///< Keeps the pieces' memory alive.
  PayloadPlace place = PayloadPlace::kMessage;
  bool is_pinned = false;  ///< True for page-locked host memory, from which GPUs copy in place.
  int32_t gpu = -1;        ///< CUDA ordinal; -1 unless `place` is kDevice.
};

/// A parsed proto ScoreRequest. The proto file documents the fields. The small arrays are decoded,
/// and enums are the numbers on the wire. The parser checks only the wire format; ValidateRequest
/// checks the rest. proto/generate.py writes the lines between [generated: NAME] and [end].
struct ScoreRequest {
  // [generated: request_members]
  uint64_t weights_version = 0;
  int32_t dtype_number = 0;
  int64_t rows = 0;
  int64_t hidden_size = 0;
  std::vector<int32_t> targets;
  std::optional<float> temperature;
  std::vector<float> row_temperatures;
  std::optional<float> entropy_temperature;
  int64_t top_k = 0;
  std::vector<int32_t> candidate_ids;
  std::vector<uint32_t> candidate_offsets;
  std::vector<uint32_t> segment_offsets;
  int32_t priority_number = 0;
  bool reject_nonfinite = false;
  uint64_t chunk_id = 0;
  bool trace = false;
  // [end]
  std::string request_id;
  std::string head;
  int32_t ignore_index = kDefaultIgnoreIndex;
  uint32_t output_bits = 0;    ///< The number on the wire; call `outputs()` after validation.
  TraceContext trace_context;  ///< Of the field `traceparent`, or else of the call's metadata.
  HiddenPayload hidden;
  /// Location of the rows if they are not in the message; at most one of the two is set. The
  /// transport finds the memory and sets `hidden`.
  std::optional<SharedMemorySlice> shared_memory;
  std::optional<CudaIpcSlice> cuda_ipc;

  // The transport sets the fields below; the client's message does not have them.
  /// Whose request it is, for admission, fairness and limits: the tenant of the caller's token or
  /// certificate. On a server without tokens, it is the id from the metadata or the peer's address.
  std::string client_id;
  /// Divides only the turns of `client_id`: for a tenant, the id from the metadata or the peer's
  /// address. Empty on a server without tokens. All requests of a client have one, or none has.
  std::string sub_client_id;
  double client_share = 0;  ///< Share of the queue that the client may hold; 0 means the default.
  absl::Time deadline = absl::InfiniteFuture();  ///< Time of the server's Clock.
  absl::Time received;                           ///< Time of the server's Clock.
  int64_t message_bytes = 0;  ///< Size of the whole message, which `hidden.owner` keeps alive.

  Dtype dtype() const { return static_cast<Dtype>(dtype_number); }
  OutputSet outputs() const { return output_bits == 0 ? kDefaultOutputs : OutputSet(output_bits); }
  Priority priority() const {
    return priority_number == 0 ? Priority::kNormal : static_cast<Priority>(priority_number - 1);
  }
  int64_t num_segments() const {
    return segment_offsets.empty() ? 0 : static_cast<int64_t>(segment_offsets.size()) - 1;
  }
  ColumnCounts column_counts() const {
    return {.rows = rows,
            .top_k = top_k,
            .candidates = static_cast<int64_t>(candidate_ids.size()),
            .segments = num_segments()};
  }
  /// Returns outputs() and, for segments, also the row scores from which their sums are computed.
  OutputSet computed_outputs() const {
    return segment_offsets.empty() ? outputs()
                                   : outputs().With(Output::kLogprob).With(Output::kGreedy);
  }
};

/// Maximum time by which gRPC may end a call before its deadline, because gRPC's timers are coarse.
inline constexpr absl::Duration kDeadlineSlack = absl::Milliseconds(20);

/// Returns the status of a call that ends at `now` with `status`: DEADLINE_EXCEEDED with the
/// message `late` if it was cancelled at its deadline, otherwise `status`. gRPC does not report the
/// reason for which it cancels a call, so that any cancellation within kDeadlineSlack of the
/// deadline counts as a passed deadline.
absl::Status LateIfDue(absl::Status status, absl::Time deadline, absl::Time now,
                       absl::string_view late);

// The functions below compute the memory that a validated request needs, for the limits on memory.
// They add the sizes of arrays; the limits on the number of requests bound the constant part of
// each request.

/// Returns the bytes of the message as it arrived and of the list of its pieces, which are held
/// until the last row of the payload is gathered. Rows in shared memory or on a GPU keep no message
/// and have separate limits.
int64_t PayloadBytes(const ScoreRequest& request);

/// Returns the bytes of the decoded fields without the payload, which are held until the request is
/// answered.
int64_t FieldBytes(const ScoreRequest& request);

/// Returns the bytes of the arrays of the request's answer, including arrays that are only needed
/// to compute it.
int64_t AnswerBytes(const ScoreRequest& request);

}  // namespace logprobd
