#include "client/cpp/request_encoder.h"

#include <grpcpp/support/slice.h>

#include <array>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "logprobd/v1/scoring.pb.h"

namespace logprobd::client {
namespace {

template <typename T>
void AssignBytes(absl::Span<const T> values, std::string* bytes) {
  // The wire is little-endian, as every platform that gRPC and this library are built for.
  bytes->assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

/// `offsets[begin..end]`, moved to start at 0, as u32.
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
  return plan.sum_segments_locally ? outputs | output::kLogprob | output::kGreedy : outputs;
}

namespace {

/// All but the hidden states.
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
  if (!args.segment_offsets.empty() && !plan.sum_segments_locally) {
    AssignOffsets(args.segment_offsets, request.mutable_segment_offsets());
  }
  request.set_priority(static_cast<v1::Priority>(args.priority));
  request.set_reject_nonfinite(args.reject_nonfinite);
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

}  // namespace logprobd::client
