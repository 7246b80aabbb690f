#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/base/clock.h"
#include "server/base/score_request.h"
#include "server/base/weight_store.h"
#include "server/transport/audit.h"
#include "server/transport/grpc_message.h"
#include "server/transport/push_parser.h"
#include "server/transport/same_host_access.h"

namespace logprobd {

/// A call of Weights.Push. It owns itself.
class PushCall final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  /// Maximum number of bytes in PushedRows::data.
  static constexpr int64_t kDataBytesMax = int64_t{8} << 20;
  /// A call ends when no message has arrived for this time, so that an idle one does not keep its
  /// place (WeightsService::kPushesMax). One of kDataBytesMax then needs 2.3 Mbit/s.
  static constexpr absl::Duration kIdleMax = absl::Seconds(30);

  /// The references must be valid until Run has returned, and `response` until OnDone.
  struct Context {
    WeightStore& store;
    ChangeAudit audit;
    const SameHostAccess* same_host;  ///< If it is null, rows must be in the messages.
    const Clock& clock;
    const std::atomic<bool>& ends_soon;  ///< Ends a call that waits for rows with UNAVAILABLE.
    grpc::ByteBuffer& response;
  };

  explicit PushCall(Context context) : context_(std::move(context)) {}

  /// Ends a call that does not run.
  void Refuse(const absl::Status& status);

  /// Receives the rows, stages the version if they were the last, and answers. Blocks.
  void Run();

  void OnReadDone(bool has_message) override;
  void OnCancel() override;
  void OnDone() override { delete this; }

 private:
  /// Rows of a message in shared memory or in a GPU's memory.
  struct PlacedRows {
    HiddenPayload payload;
    int64_t row_bytes = 0;
    int64_t rows_read = 0;
  };

  absl::StatusOr<PushedWeightsResult> Receive();
  absl::Status CheckNotCancelled() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Frees the rows of the last message, waits for the next one, parses it into `parsed_` and
  /// begins to read the one after it. Returns INVALID_ARGUMENT if it has more than `bytes_max`
  /// bytes, and false at the end of the stream. A cancelled stream may also look like its end; what
  /// follows then learns of the cancellation from the progress.
  absl::StatusOr<bool> Read(size_t bytes_max);
  absl::StatusOr<std::optional<PushedRows>> Next();
  absl::StatusOr<HiddenPayload> FindPayload(const v1::PushedRows& rows) const;
  /// Returns the next rows of `placed_`, so few that a cancelled call ends soon. Copies them to the
  /// host if they are in a GPU's memory.
  absl::StatusOr<std::optional<PushedRows>> NextPlaced();

  Context context_;
  absl::Mutex mutex_;
  bool is_read_ ABSL_GUARDED_BY(mutex_) = false;  // the outstanding read has ended
  bool has_message_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ByteBuffer buffer_;  // The outstanding read fills it.

  // Used by Run's thread only. A message stays where gRPC received it, and counts against gRPC's
  // memory quota, until its rows are used.
  PayloadSlices slices_;
  ParsedPush parsed_;
  std::optional<PlacedRows> placed_;  // keeps the memory of the last rows
  std::vector<std::byte> staging_;    // for rows in a GPU's memory
};

}  // namespace logprobd
