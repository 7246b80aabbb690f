#include "client/cpp/chunk_messages.h"

#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "logprobd/v1/scoring.pb.h"

namespace logprobd::client {

namespace {

template <typename T>
void AssignBytes(absl::Span<const T> values, std::string* bytes) {
  // The wire format is little-endian, like every platform that this library supports.
  bytes->assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

/// Writes `offsets` as u32, shifted to start at 0.
void AssignOffsets(absl::Span<const int64_t> offsets, std::string* bytes) {
  std::vector<uint32_t> moved;
  moved.reserve(offsets.size());
  for (const int64_t offset : offsets) {
    moved.push_back(static_cast<uint32_t>(offset - offsets.front()));
  }
  AssignBytes<uint32_t>(moved, bytes);
}

void AppendVarint(uint64_t value, std::string* bytes) {
  while (value >= 0x80) {
    bytes->push_back(static_cast<char>((value & 0x7F) | 0x80));
    value >>= 7;
  }
  bytes->push_back(static_cast<char>(value));
}

template <size_t kSize>
std::string ToString(const std::array<uint8_t, kSize>& bytes) {
  return {bytes.begin(), bytes.end()};
}

void DropHold(void* hold) { delete static_cast<std::shared_ptr<void>*>(hold); }

}  // namespace

uint32_t RequestedOutputs(const ScoreArgs& args, const ChunkPlan& plan) {
  const uint32_t outputs = args.outputs == 0 ? output::kDefault : args.outputs;
  return plan.sum_segments_in_client ? outputs | output::kLogprob | output::kGreedy : outputs;
}

namespace {

/// Encodes all fields except the hidden states.
v1::ScoreRequest SmallFields(const ScoreArgs& args, const ChunkPlan& plan, const Chunk& chunk) {
  const auto row_begin = static_cast<size_t>(chunk.row_begin);
  const auto rows = static_cast<size_t>(chunk.rows());

  v1::ScoreRequest request;
  request.set_request_id(args.request_id);
  request.set_head(args.head);
  request.set_weights_version(args.weights_version);
  request.set_dtype(static_cast<v1::Dtype>(args.dtype));
  request.set_rows(static_cast<uint32_t>(rows));
  request.set_hidden_size(static_cast<uint32_t>(args.hidden_size));
  AssignBytes(args.targets.subspan(row_begin, rows), request.mutable_targets());
  if (!args.row_temperatures.empty()) {
    AssignBytes(args.row_temperatures.subspan(row_begin, rows), request.mutable_row_temperatures());
  }
  if (args.row_temperatures.empty() || args.temperature != 1.0F) {
    request.set_temperature(args.temperature);
  }
  if (args.entropy_temperature.has_value()) {
    request.set_entropy_temperature(*args.entropy_temperature);
  }
  request.set_ignore_index(args.ignore_index);
  request.set_outputs(RequestedOutputs(args, plan));
  request.set_top_k(static_cast<uint32_t>(args.top_k));
  if (!args.candidate_offsets.empty()) {
    AssignBytes(args.candidate_ids.subspan(
                    static_cast<size_t>(chunk.candidate_begin),
                    static_cast<size_t>(chunk.candidate_end - chunk.candidate_begin)),
                request.mutable_candidate_ids());
    AssignOffsets(args.candidate_offsets.subspan(row_begin, rows + 1),
                  request.mutable_candidate_offsets());
  }
  if (!args.segment_offsets.empty() && !plan.sum_segments_in_client) {
    AssignOffsets(args.segment_offsets, request.mutable_segment_offsets());
  }
  request.set_priority(static_cast<v1::Priority>(args.priority));
  request.set_reject_nonfinite(args.reject_nonfinite);
  request.set_trace(args.trace);
  return request;
}

}  // namespace

grpc::ByteBuffer EncodeScoreRequest(const ScoreArgs& args, const ChunkPlan& plan,
                                    const Chunk& chunk, std::shared_ptr<void> hold) {
  const auto row_begin = static_cast<size_t>(chunk.row_begin);
  const auto rows = static_cast<size_t>(chunk.rows());
  const auto row_bytes = static_cast<size_t>(args.hidden_size * DtypeBytes(args.dtype));
  const absl::Span<const std::byte> hidden =
      args.hidden.subspan(row_begin * row_bytes, rows * row_bytes);
  std::string header = SmallFields(args, plan, chunk).SerializeAsString();
  if (hidden.empty()) {
    const grpc::Slice slice(header);
    return {&slice, 1};
  }
  constexpr uint64_t kLengthDelimited = 2;
  AppendVarint(uint64_t{v1::ScoreRequest::kHiddenFieldNumber} << 3 | kLengthDelimited, &header);
  AppendVarint(hidden.size(), &header);
  const std::array<grpc::Slice, 2> slices = {
      grpc::Slice(header),
      // gRPC takes a mutable pointer for a slice but never writes through it.
      grpc::Slice(const_cast<std::byte*>(hidden.data()), hidden.size(), DropHold,
                  new std::shared_ptr<void>(std::move(hold)))};
  return {slices.data(), slices.size()};
}

grpc::ByteBuffer EncodeSliceRequest(const ScoreArgs& args, const ChunkPlan& plan,
                                    const Chunk& chunk, const Placement& placement) {
  v1::ScoreRequest request = SmallFields(args, plan, chunk);
  if (placement.shared.has_value()) {
    v1::SharedMemorySlice& slice = *request.mutable_shared_memory();
    slice.set_region(placement.shared->region->id());
    slice.set_offset(static_cast<uint64_t>(placement.shared->offset));
    slice.set_bytes(static_cast<uint64_t>(placement.shared->bytes));
  } else {
    v1::CudaIpcSlice& slice = *request.mutable_cuda_ipc();
    slice.set_lease(placement.lease->grant().lease);
    slice.set_device_uuid(ToString(placement.device->device_uuid));
    slice.set_handle(ToString(placement.device->handle));
    slice.set_offset(static_cast<uint64_t>(placement.device->offset));
    slice.set_bytes(static_cast<uint64_t>(placement.device->bytes));
  }
  const grpc::Slice slice(request.SerializeAsString());
  return {&slice, 1};
}

namespace {

StageTrace ReadStage(const v1::TraceStage& stage) {
  return {.begin = absl::Nanoseconds(stage.begin_ns()), .end = absl::Nanoseconds(stage.end_ns())};
}

RequestTrace ReadTrace(const v1::Trace& trace) {
  const auto read_if = [](bool has, const v1::TraceStage& stage) {
    return has ? std::optional(ReadStage(stage)) : std::nullopt;
  };
  return {.traceparent = trace.traceparent(),
          .received = absl::FromUnixNanos(static_cast<int64_t>(trace.received_unix_ns())),
          .receive = ReadStage(trace.receive()),
          .queue = ReadStage(trace.queue()),
          .copy = read_if(trace.has_copy(), trace.copy()),
          .engine = read_if(trace.has_engine(), trace.engine()),
          .kernel = absl::Nanoseconds(trace.kernel_ns()),
          .reply = ReadStage(trace.reply())};
}

}  // namespace

ResultMerger::ResultMerger(const ScoreArgs& args, const ChunkPlan& plan)
    : args_(args), plan_(plan), parts_(plan.chunks.size()) {
  result_.rows = args.rows;
  result_.top_k = args.top_k;
  const uint32_t outputs = RequestedOutputs(args, plan);
  const auto segments =
      static_cast<int64_t>(args.segment_offsets.empty() ? 0 : args.segment_offsets.size() - 1);
  ForEachScoreColumn([&](const auto& column) {
    // Memory for top_k is allocated with the first response of the right size and not earlier: the
    // server validates top_k, and memory for a huge value might not be available.
    if (column.shape == ColumnShape::kTopK) return;
    const int64_t count =
        column.shape == ColumnShape::kRow         ? ((outputs & column.bit) != 0 ? args.rows : 0)
        : column.shape == ColumnShape::kCandidate ? static_cast<int64_t>(args.candidate_ids.size())
                                                  : segments;
    (result_.*column.values).resize(static_cast<size_t>(count));
  });
}

absl::StatusOr<bool> ResultMerger::Add(
    const Chunk& chunk, const grpc::ByteBuffer& body,
    absl::FunctionRef<absl::StatusOr<bool>(uint64_t weights_version)> keeps) {
  v1::ScoreResponse response;
  grpc::ByteBuffer bytes = body;  // the reader empties it; only references are copied
  grpc::ProtoBufferReader reader(&bytes);
  if (!reader.status().ok() || !response.ParseFromZeroCopyStream(&reader)) {
    return absl::InternalError("the server's answer is not a ScoreResponse");
  }
  if (response.rows() != chunk.rows()) {
    return absl::InternalError(absl::StrCat("the server answered ", response.rows(), " rows, but ",
                                            chunk.rows(), " were sent"));
  }
  absl::StatusOr<bool> is_kept = keeps(response.weights_version());
  if (!is_kept.ok() || !*is_kept) return is_kept;

  const int64_t rows = chunk.rows();
  const uint32_t outputs = RequestedOutputs(args_, plan_);
  const int64_t segments =
      plan_.sum_segments_in_client ? 0 : static_cast<int64_t>(result_.segment_logprob.size());
  absl::Status status;
  ForEachScoreColumn([&](const auto& column) {
    int64_t begin = chunk.row_begin;
    int64_t count = rows;
    switch (column.shape) {
      case ColumnShape::kRow:
        count = (outputs & column.bit) != 0 ? rows : 0;
        break;
      case ColumnShape::kTopK:
        begin *= args_.top_k;
        count *= args_.top_k;
        break;
      case ColumnShape::kCandidate:
        begin = chunk.candidate_begin;
        count = chunk.candidate_end - begin;
        break;
      case ColumnShape::kSegment:
        begin = 0;
        count = segments;
        break;
    }
    auto& values = result_.*column.values;
    std::string scratch;
    const std::string& bytes = response.GetReflection()->GetStringReference(
        response, response.GetDescriptor()->FindFieldByNumber(column.field), &scratch);
    const auto expected_bytes = static_cast<size_t>(count) * sizeof(values[0]);
    if (bytes.size() != expected_bytes) {
      status.Update(absl::InternalError(absl::StrCat("the server sent ", bytes.size(), " bytes of ",
                                                     column.name, ", but the client expects ",
                                                     expected_bytes)));
    } else if (expected_bytes > 0) {
      if (column.shape == ColumnShape::kTopK) {
        values.resize(static_cast<size_t>(args_.rows * args_.top_k));
      }
      std::memcpy(values.data() + begin, bytes.data(), expected_bytes);
    }
  });
  if (!status.ok()) return status;

  Part& part = parts_[static_cast<size_t>(&chunk - plan_.chunks.data())];
  part = {};
  part.weights_version = response.weights_version();
  part.ignored_rows = response.ignored_rows();
  part.nonfinite_rows = response.nonfinite_rows();
  if (response.has_trace()) part.trace = ReadTrace(response.trace());
  ServerTimings& timings = result_.timings;
  timings.queue_us = std::max(timings.queue_us, response.timings().queue_us());
  timings.copy_us = std::max(timings.copy_us, response.timings().copy_us());
  timings.engine_us = std::max(timings.engine_us, response.timings().engine_us());
  timings.total_us = std::max(timings.total_us, response.timings().total_us());
  return true;
}

std::vector<const Chunk*> ResultMerger::OtherThan(uint64_t weights_version) const {
  std::vector<const Chunk*> chunks;
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i].weights_version != weights_version) chunks.push_back(&plan_.chunks[i]);
  }
  return chunks;
}

ScoreResult ResultMerger::Finish() {
  result_.requests = static_cast<int32_t>(plan_.chunks.size());
  std::set<uint64_t> versions;
  for (Part& part : parts_) {
    versions.insert(part.weights_version);
    if (part.trace.has_value()) result_.traces.push_back(*std::move(part.trace));
    result_.ignored_rows += part.ignored_rows;
    result_.nonfinite_rows += part.nonfinite_rows;
  }
  result_.weights_versions.assign(versions.begin(), versions.end());
  result_.weights_version = result_.weights_versions.back();
  if (plan_.sum_segments_in_client) SumSegments();
  return std::move(result_);
}

void ResultMerger::SumSegments() {
  for (size_t segment = 0; segment < result_.segment_logprob.size(); ++segment) {
    double sum = 0;
    uint32_t scored = 0;
    bool greedy = true;
    for (int64_t row = args_.segment_offsets[segment]; row < args_.segment_offsets[segment + 1];
         ++row) {
      const auto index = static_cast<size_t>(row);
      if (args_.targets[index] == args_.ignore_index) continue;
      sum += static_cast<double>(result_.logprob[index]);
      greedy = greedy && result_.greedy[index] != 0;
      ++scored;
    }
    result_.segment_logprob[segment] = sum;
    result_.segment_rows[segment] = scored;
    result_.segment_greedy[segment] = greedy ? 1 : 0;
  }
  // These outputs were requested only for the sums.
  const uint32_t outputs = args_.outputs == 0 ? output::kDefault : args_.outputs;
  if ((outputs & output::kLogprob) == 0) result_.logprob = {};
  if ((outputs & output::kGreedy) == 0) result_.greedy = {};
}

}  // namespace logprobd::client
