#include "server/transport/response_encoder.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "grpcpp/support/slice.h"
#include "logprobd/v1/scoring.pb.h"
#include "server/transport/grpc_status.h"

namespace logprobd {
namespace {

static_assert(std::endian::native == std::endian::little, "arrays are sent without conversion");

constexpr uint32_t kBytesType = 2;

/// Smallest array that gets a slice of its own. Smaller arrays are cheaper to copy.
constexpr size_t kSliceBytesMin = 4'096;

void AppendVarint(std::string& out, uint64_t value) {
  while (value >= 0x80) {
    out.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<char>(value));
}

/// Writes a message: small fields collect in one buffer, and large arrays become slices between
/// them.
class MessageWriter {
 public:
  void Add(const v1::ScoreResponse& fields) {
    (void)fields.AppendToString(&buffer_);  // It fails only for messages above 2 GiB.
  }

  template <typename T>
  void AddArray(uint32_t field, std::vector<T> values) {
    if (values.empty()) return;
    const size_t bytes = values.size() * sizeof(T);
    AppendVarint(buffer_, field << 3 | kBytesType);
    AppendVarint(buffer_, bytes);
    if (bytes < kSliceBytesMin) {
      buffer_.append(reinterpret_cast<const char*>(values.data()), bytes);
      return;
    }
    Flush();
    auto* owned = new std::vector<T>(std::move(values));
    slices_.emplace_back(
        owned->data(), bytes, [](void* array) { delete static_cast<std::vector<T>*>(array); },
        owned);
  }

  grpc::ByteBuffer Finish() && {
    Flush();
    return {slices_.data(), slices_.size()};
  }

 private:
  void Flush() {
    if (!buffer_.empty()) {
      slices_.emplace_back(buffer_.data(), buffer_.size());
      buffer_.clear();
    }
  }

  std::string buffer_;
  std::vector<grpc::Slice> slices_;
};

uint32_t Microseconds(double seconds) {
  constexpr double kMax = std::numeric_limits<uint32_t>::max();
  return static_cast<uint32_t>(std::clamp(seconds * 1e6, 0.0, kMax));
}

v1::StageTimings TimingsOf(const StageSeconds& stages) {
  v1::StageTimings timings;
  timings.set_queue_us(Microseconds(stages.queue));
  timings.set_copy_us(Microseconds(stages.copy));
  timings.set_engine_us(Microseconds(stages.engine));
  timings.set_total_us(Microseconds(stages.total));
  return timings;
}

uint64_t Nanoseconds(absl::Duration duration) {
  return static_cast<uint64_t>(std::max<int64_t>(absl::ToInt64Nanoseconds(duration), 0));
}

v1::Trace TraceOf(const ReplyTrace& trace, const StageTimes& times) {
  v1::Trace out;
  const auto set = [&](v1::TraceStage& stage, absl::Time begin, absl::Time end) {
    stage.set_begin_ns(Nanoseconds(begin - trace.received));
    stage.set_end_ns(Nanoseconds(end - trace.received));
  };
  const bool has_batch = times.has_batch();
  const absl::string_view traceparent = trace.context.traceparent();
  out.set_traceparent(traceparent.data(), traceparent.size());
  out.set_received_unix_ns(Nanoseconds(trace.received_wall - absl::UnixEpoch()));
  set(*out.mutable_receive(), trace.received, times.submitted);
  set(*out.mutable_queue(), times.submitted, has_batch ? times.last_cut : times.submitted);
  if (has_batch) {
    set(*out.mutable_copy(), times.first_cut, times.last_start);
    set(*out.mutable_engine(), times.first_start, times.last_end);
  }
  out.set_kernel_ns(Nanoseconds(absl::Seconds(times.kernel_seconds)));
  set(*out.mutable_reply(), has_batch ? times.last_end : times.submitted, trace.replied);
  return out;
}

}  // namespace

grpc::ByteBuffer EncodeScoreReply(ScoreReply reply) {
  MessageWriter writer;
  ScoreResult& result = reply.result;
  v1::ScoreResponse head;  // the fields before the scores
  head.set_request_id(std::move(reply.request_id));
  head.set_chunk_id(reply.chunk_id);
  head.set_weights_version(result.weights_version);
  if (!reply.status.ok()) {
    head.set_status_code(static_cast<int32_t>(reply.status.code()));
    head.set_status_message(std::string(ClientMessage(reply.status)));
    head.set_retry_after_ms(RetryAfterMs(reply.status));
    writer.Add(head);
    return std::move(writer).Finish();
  }
  head.set_rows(static_cast<uint32_t>(result.rows));
  head.set_ignored_rows(static_cast<uint32_t>(result.ignored_rows));
  head.set_nonfinite_rows(static_cast<uint32_t>(result.nonfinite_rows));
  writer.Add(head);
  ForEachOutputColumn([&](const auto& column) {
    writer.AddArray(column.wire_field, std::move(result.*column.values));
  });
  v1::ScoreResponse tail;
  const v1::StageTimings timings = TimingsOf(result.stages);
  if (timings.ByteSizeLong() > 0) *tail.mutable_timings() = timings;
  if (reply.trace.has_value()) *tail.mutable_trace() = TraceOf(*reply.trace, result.times);
  writer.Add(tail);
  return std::move(writer).Finish();
}

}  // namespace logprobd
