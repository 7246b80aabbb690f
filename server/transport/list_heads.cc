#include <memory>

#include "absl/status/status.h"
#include "logprobd/v1/scoring.pb.h"
#include "server/transport/grpc_status.h"
#include "server/transport/info_calls.h"
#include "server/transport/proto_message.h"

namespace logprobd {
namespace {

void Fill(const RequestLimits& limits, v1::Limits& out) {
  out.set_message_bytes_max(static_cast<uint64_t>(limits.message_bytes_max));
  out.set_request_rows_max(static_cast<uint32_t>(limits.request_rows_max));
  out.set_top_k_max(static_cast<uint32_t>(limits.top_k_max));
  out.set_candidates_max(static_cast<uint32_t>(limits.candidates_max));
  out.set_segments_max(static_cast<uint32_t>(limits.segments_max));
  out.set_stream_window(static_cast<uint32_t>(limits.stream_window));
}

void Fill(const ServedHead& head, const ServerInfo& server, v1::Head& out) {
  const std::shared_ptr<const HeadInfo> facts = head.info();
  const HeadInfo& info = *facts;
  out.set_name(info.name);
  out.set_model_type(info.model_type);
  out.set_vocab_size(static_cast<uint32_t>(info.vocab_size));
  out.set_vocab_rows(static_cast<uint32_t>(info.vocab_rows));
  out.set_hidden_size(static_cast<uint32_t>(info.hidden_size));
  out.set_dtype(static_cast<v1::Dtype>(info.dtype));
  out.set_weights_version(info.weights_version);
  out.set_ready(head.ready());
  out.set_tied(info.tied);
  out.set_scale(info.scale);
  out.set_softcap(info.softcap);
  out.set_has_bias(info.has_bias);
  out.set_tensor(info.tensor);
  out.set_engine(info.engine);
  out.set_weight_bytes(static_cast<uint64_t>(info.weight_bytes));
  Fill(info.limits, *out.mutable_limits());
  for (const std::string& transport : server.transports) {
    out.add_transports(transport);
  }
  for (const ShardPlace& place : info.layout) {
    v1::Shard& shard = *out.add_layout();
    shard.set_replica(static_cast<uint32_t>(place.replica));
    shard.set_shard(static_cast<uint32_t>(place.shard));
    shard.set_device(place.device);
    shard.set_vocab_begin(static_cast<uint32_t>(place.vocab_begin));
    shard.set_vocab_end(static_cast<uint32_t>(place.vocab_end));
  }
}

void Fill(const LocalAccess::Facts& local, v1::LocalAccess& out) {
  out.set_boot_id(local.boot_id);
  out.set_grpc_path(local.grpc_path);
  out.set_control_path(local.control_path);
  out.set_shared_memory(local.shared_memory);
  out.set_cuda_ipc(local.cuda_ipc);
}

}  // namespace

grpc::ServerUnaryReactor* StartListHeads(const HeadRegistry& heads, const ServerInfo& server,
                                         Metrics& metrics, const Clock& clock,
                                         grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& request,
                                         grpc::ByteBuffer& response) {
  const absl::Time received = clock.Now();
  v1::ListHeadsRequest message;
  const absl::Status status = ParseSmallMessage(request, message);
  if (status.ok()) {
    v1::ListHeadsResponse answer;
    answer.set_server_version(server.version);
    for (const std::shared_ptr<ServedHead>& head : heads.List()) {
      Fill(*head, server, *answer.add_heads());
    }
    if (server.local.has_value()) {
      Fill(*server.local, *answer.mutable_local());
    }
    response = SerializeMessage(answer);
  }
  metrics.RecordRequest(Metrics::Method::kListHeads, "", status.code(),
                        absl::ToDoubleSeconds(clock.Now() - received), Metrics::Transport::kTcp);
  grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace logprobd
