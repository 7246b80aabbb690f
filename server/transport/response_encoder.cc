#include "server/transport/response_encoder.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "grpcpp/support/slice.h"
#include "server/transport/grpc_status.h"

namespace logprobd {
namespace {

static_assert(std::endian::native == std::endian::little, "arrays are sent without conversion");

constexpr uint32_t kVarintType = 0;
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

void AppendNumber(std::string& out, uint32_t field, uint64_t value) {
  if (value != 0) {
    AppendVarint(out, field << 3 | kVarintType);
    AppendVarint(out, value);
  }
}

void AppendHeader(std::string& out, uint32_t field, size_t bytes) {
  AppendVarint(out, field << 3 | kBytesType);
  AppendVarint(out, bytes);
}

void AppendBytes(std::string& out, uint32_t field, absl::string_view bytes) {
  if (!bytes.empty()) {
    AppendHeader(out, field, bytes.size());
    out.append(bytes.data(), bytes.size());
  }
}

/// Writes a message: small fields collect in one buffer, and large arrays become slices between
/// them.
class MessageWriter {
 public:
  std::string& buffer() { return buffer_; }

  template <typename T>
  void AddArray(uint32_t field, std::vector<T> values) {
    const size_t bytes = values.size() * sizeof(T);
    if (bytes < kSliceBytesMin) {
      AppendBytes(buffer_, field, {reinterpret_cast<const char*>(values.data()), bytes});
      return;
    }
    AppendHeader(buffer_, field, bytes);
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

uint64_t Microseconds(double seconds) {
  constexpr double kMax = std::numeric_limits<uint32_t>::max();
  return static_cast<uint64_t>(std::clamp(seconds * 1e6, 0.0, kMax));
}

std::string EncodeTimings(const StageSeconds& stages) {
  std::string out;
  AppendNumber(out, 1, Microseconds(stages.queue));
  AppendNumber(out, 2, Microseconds(stages.copy));
  AppendNumber(out, 3, Microseconds(stages.engine));
  AppendNumber(out, 4, Microseconds(stages.total));
  return out;
}

uint64_t Nanoseconds(absl::Duration duration) {
  return static_cast<uint64_t>(std::max<int64_t>(absl::ToInt64Nanoseconds(duration), 0));
}

std::string EncodeTrace(const ReplyTrace& trace, const StageTimes& times) {
  std::string out;
  const auto append_stage = [&](uint32_t field, absl::Time begin, absl::Time end) {
    std::string stage;
    AppendNumber(stage, 1, Nanoseconds(begin - trace.received));
    AppendNumber(stage, 2, Nanoseconds(end - trace.received));
    AppendHeader(out, field, stage.size());
    out += stage;
  };
  const bool has_batch = times.has_batch();
  AppendBytes(out, 1, trace.context.traceparent());
  AppendNumber(out, 2, Nanoseconds(trace.received_wall - absl::UnixEpoch()));
  append_stage(3, trace.received, times.submitted);
  append_stage(4, times.submitted, has_batch ? times.last_cut : times.submitted);
  if (has_batch) {
    append_stage(5, times.first_cut, times.last_start);
    append_stage(6, times.first_start, times.last_end);
  }
  AppendNumber(out, 7, Nanoseconds(absl::Seconds(times.kernel_seconds)));
  append_stage(8, has_batch ? times.last_end : times.submitted, trace.replied);
  return out;
}

}  // namespace

grpc::ByteBuffer EncodeScoreReply(ScoreReply reply) {
  MessageWriter writer;
  std::string& out = writer.buffer();
  ScoreResult& result = reply.result;
  AppendBytes(out, 1, reply.request_id);
  AppendNumber(out, 2, reply.chunk_id);
  AppendNumber(out, 3, result.weights_version);
  if (!reply.status.ok()) {
    AppendNumber(out, 4, static_cast<uint64_t>(reply.status.code()));
    AppendBytes(out, 5, ClientMessage(reply.status));
    AppendNumber(out, 6, RetryAfterMs(reply.status));
    return std::move(writer).Finish();
  }
  AppendNumber(out, 7, static_cast<uint64_t>(result.rows));
  AppendNumber(out, 8, static_cast<uint64_t>(result.ignored_rows));
  AppendNumber(out, 9, static_cast<uint64_t>(result.nonfinite_rows));
  ForEachOutputColumn([&](const auto& column) {
    writer.AddArray(column.wire_field, std::move(result.*column.values));
  });
  AppendBytes(out, 25, EncodeTimings(result.stages));
  if (reply.trace.has_value()) {
    AppendBytes(out, 27, EncodeTrace(*reply.trace, result.times));
  }
  return std::move(writer).Finish();
}

}  // namespace logprobd
