#include "client/cpp/server_messages.h"

#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "logprobd/v1/scoring.pb.h"

namespace logprobd::client {

namespace {

template <typename Message>
grpc::ByteBuffer Encode(const Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return {&slice, 1};
}

template <typename Message>
absl::Status Parse(const grpc::ByteBuffer& body, Message* message) {
  grpc::ByteBuffer bytes = body;  // the reader empties it; only references are copied
  grpc::ProtoBufferReader reader(&bytes);
  if (!reader.status().ok() || !message->ParseFromZeroCopyStream(&reader)) {
    return absl::InternalError(
        absl::StrCat("the server's answer is not a ", message->GetTypeName()));
  }
  return absl::OkStatus();
}

Limits ToLimits(const v1::Limits& limits) {
  Limits result;
  // A field that an old server does not send keeps its cautious default.
  if (limits.message_bytes_max() > 0) {
    result.message_bytes_max = static_cast<int64_t>(limits.message_bytes_max());
  }
  if (limits.request_rows_max() > 0) result.request_rows_max = limits.request_rows_max();
  if (limits.candidates_max() > 0) result.candidates_max = limits.candidates_max();
  if (limits.segments_max() > 0) result.segments_max = limits.segments_max();
  result.top_k_max = limits.top_k_max();
  result.stream_window = limits.stream_window();
  return result;
}

std::vector<Shard> ToLayout(const v1::Head& head) {
  std::vector<Shard> layout;
  for (const v1::Shard& shard : head.layout()) {
    layout.push_back({.replica = static_cast<int32_t>(shard.replica()),
                      .shard = static_cast<int32_t>(shard.shard()),
                      .device = shard.device(),
                      .vocab_begin = shard.vocab_begin(),
                      .vocab_end = shard.vocab_end()});
  }
  return layout;
}

Head ToHead(const v1::Head& head) {
  return {.name = head.name(),
          .model_type = head.model_type(),
          .vocab_size = head.vocab_size(),
          .vocab_rows = head.vocab_rows(),
          .hidden_size = head.hidden_size(),
          .dtype = static_cast<Dtype>(head.dtype()),
          .weights_version = head.weights_version(),
          .ready = head.ready(),
          .tied = head.tied(),
          .scale = head.scale(),
          .softcap = head.softcap(),
          .has_bias = head.has_bias(),
          .tensor = head.tensor(),
          .engine = head.engine(),
          .weight_bytes = static_cast<int64_t>(head.weight_bytes()),
          .limits = ToLimits(head.limits()),
          .transports = {head.transports().begin(), head.transports().end()},
          .layout = ToLayout(head),
          .warnings = {head.warnings().begin(), head.warnings().end()}};
}

}  // namespace

grpc::ByteBuffer EncodeListHeads() { return Encode(v1::ListHeadsRequest()); }

absl::StatusOr<ServerInfo> ParseListHeads(const grpc::ByteBuffer& body) {
  v1::ListHeadsResponse response;
  if (absl::Status status = Parse(body, &response); !status.ok()) return status;
  ServerInfo info{.server_version = response.server_version(), .local = {}, .heads = {}};
  if (response.has_local()) {
    const v1::LocalAccess& local = response.local();
    info.local = {.boot_id = local.boot_id(),
                  .grpc_path = local.grpc_path(),
                  .control_path = local.control_path(),
                  .shared_memory = local.shared_memory(),
                  .cuda_ipc = local.cuda_ipc()};
  }
  for (const v1::Head& head : response.heads()) info.heads.push_back(ToHead(head));
  return info;
}

grpc::ByteBuffer EncodeVerify(const VerifyArgs& args) {
  v1::VerifyRequest request;
  request.set_head(args.head);
  request.set_rows(static_cast<uint32_t>(args.rows));
  request.set_seed(args.seed);
  return Encode(request);
}

absl::StatusOr<VerifyReport> ParseVerify(const grpc::ByteBuffer& body) {
  v1::VerifyResponse response;
  if (absl::Status status = Parse(body, &response); !status.ok()) return status;
  return VerifyReport{.passed = response.passed(),
                      .rows = static_cast<int32_t>(response.rows()),
                      .logprob_difference_max = response.logprob_difference_max(),
                      .entropy_difference_max = response.entropy_difference_max(),
                      .logprob_tolerance = response.logprob_tolerance(),
                      .entropy_tolerance = response.entropy_tolerance(),
                      .logit_stddev = response.logit_stddev(),
                      .weights_version = response.weights_version(),
                      .engine = response.engine(),
                      .seconds = response.seconds()};
}

grpc::ByteBuffer EncodeHealthRequest(absl::string_view service) {
  constexpr char kServiceTag = 0x0A;  // field 1, length-delimited
  const grpc::Slice slice(absl::StrCat(std::string(1, kServiceTag),
                                       std::string(1, static_cast<char>(service.size())), service));
  return {&slice, 1};
}

grpc::ByteBuffer EncodeServing() {
  const grpc::Slice slice(std::string("\x08\x01", 2));  // field 1, a varint: SERVING
  return {&slice, 1};
}

absl::StatusOr<bool> IsServing(const grpc::ByteBuffer& body) {
  grpc::Slice slice;
  if (!body.DumpToSingleSlice(&slice).ok()) {
    return absl::InternalError("the health response could not be read");
  }
  if (slice.size() == 0) return false;  // the default value, UNKNOWN
  constexpr uint8_t kStatusTag = 0x08;  // field 1, varint
  constexpr uint8_t kServing = 1;
  if (slice.size() != 2 || slice.begin()[0] != kStatusTag) {
    return absl::InternalError("the health response is not a HealthCheckResponse");
  }
  return slice.begin()[1] == kServing;
}

}  // namespace logprobd::client
