#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"
#include "server/base/outputs.h"

namespace logprobd {

/// Names a region of shared memory or a lease: 16 random bytes, which nobody guesses.
using RandomId = std::array<uint8_t, 16>;

/// Where a client says that its rows lie in memory shared with the server: proto SharedMemorySlice.
/// As parsed: the offset is aligned, offset + bytes fits into 63 bits.
struct SharedMemorySlice {
  RandomId region = {};
  int64_t offset = 0;
  int64_t bytes = 0;
};

/// Where a client says that its rows lie in a GPU's memory: the fields of proto CudaIpcSlice but
/// the lease. As parsed, like SharedMemorySlice.
struct DeviceSlice {
  std::array<uint8_t, 16> device_uuid = {};
  std::array<uint8_t, 64> handle = {};
  int64_t offset = 0;
  int64_t bytes = 0;
};

/// Proto CudaIpcSlice.
struct CudaIpcSlice {
  RandomId lease = {};
  DeviceSlice memory;
};

enum class Priority : int32_t { kHigh = 0, kNormal = 1, kLow = 2 };
inline constexpr int kNumPriorities = 3;

inline constexpr int32_t kDefaultIgnoreIndex = -100;

/// Where the memory of hidden states is.
enum class PayloadPlace {
  kMessage,       ///< In the slices of the request's message.
  kSharedMemory,  ///< In a region shared with the client, which may write there at any time.
  kDevice,        ///< In memory of the GPU `gpu`, the client's: not readable by the host.
};

/// A payload in the pieces in which it arrived; nothing is copied until a batch is formed.
struct HiddenPayload {
  std::vector<absl::Span<const std::byte>> pieces;  ///< One where the place is not kMessage.
  int64_t bytes = 0;                                ///< Sum over the pieces.
  std::shared_ptr<void> owner;                      ///< Keeps the pieces' memory alive.
  PayloadPlace place = PayloadPlace::kMessage;
  bool is_pinned = false;  ///< Of the host, page-locked: GPUs copy from it in place.
  int32_t gpu = -1;        ///< CUDA ordinal for kDevice.
};

/// A request as parsed: the fields of proto ScoreRequest, small arrays decoded, nothing checked
/// beyond the wire format. Shapes and meanings are stated there.
struct ScoreRequest {
  std::string request_id;
  std::string head;
  uint64_t weights_version = 0;
  uint64_t chunk_id = 0;
  int32_t dtype_number = 0;  ///< As on the wire, perhaps unknown; `dtype()` once validated.
  int64_t rows = 0;
  int64_t hidden_size = 0;
  std::vector<int32_t> targets;         ///< [rows]
  std::optional<float> temperature;     ///< Absent: 1.
  std::vector<float> row_temperatures;  ///< [rows], or empty.
  std::optional<float> entropy_temperature;
  int32_t ignore_index = kDefaultIgnoreIndex;
  uint32_t output_bits = 0;  ///< As on the wire; `outputs()` once validated.
  int64_t top_k = 0;
  std::vector<int32_t> candidate_ids;
  std::vector<uint32_t> candidate_offsets;  ///< [rows + 1], or empty.
  std::vector<uint32_t> segment_offsets;    ///< [segments + 1], or empty.
  int32_t priority_number = 0;              ///< As on the wire; `priority()` once validated.
  bool reject_nonfinite = false;
  HiddenPayload hidden;
  /// Where the rows lie instead, at most one of the two; the transport makes `hidden` of it.
  std::optional<SharedMemorySlice> shared_memory;
  std::optional<CudaIpcSlice> cuda_ipc;

  /// Set by the transport, not by the client's message.
  std::string client_id;                         ///< For fairness: metadata, else peer address.
  absl::Time deadline = absl::InfiniteFuture();  ///< On the server's Clock.
  absl::Time received;                           ///< On the server's Clock.
  int64_t message_bytes = 0;  ///< The whole message, which `hidden.owner` keeps alive.

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
  /// outputs(), and for segments also the row scores that their sums are computed from.
  OutputSet computed_outputs() const {
    return segment_offsets.empty() ? outputs()
                                   : outputs().With(Output::kLogprob).With(Output::kGreedy);
  }
};

/// How much before a call's deadline gRPC may end it: its timers are coarser than ours.
inline constexpr absl::Duration kDeadlineSlack = absl::Milliseconds(20);

/// Whether a call that gRPC has cancelled at `now` ran out of time: gRPC does not say why.
inline bool IsDue(absl::Time deadline, absl::Time now) { return now + kDeadlineSlack >= deadline; }

// What a validated request costs in memory, for the limits that bound it. Sizes of arrays, not of
// allocations; what is constant a request is bounded by the limits on requests.

/// The message as it arrived and what keeps track of its pieces: held until the payload has been
/// gathered to its last row. Rows that lie in shared memory or on a GPU keep no message, and are
/// bounded where they lie.
int64_t PayloadBytes(const ScoreRequest& request);

/// The fields decoded beside the payload: held until the request is answered.
int64_t FieldBytes(const ScoreRequest& request);

/// The arrays of its answer, those included that are only needed to make it.
int64_t AnswerBytes(const ScoreRequest& request);

}  // namespace logprobd
