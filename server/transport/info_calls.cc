#include "server/transport/info_calls.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "logprobd/v1/scoring.pb.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/transport/call_info.h"
#include "server/transport/grpc_message.h"
#include "server/transport/grpc_status.h"

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
  const std::shared_ptr<const HeadInfo> live_info = head.info();
  const HeadInfo& info = *live_info;
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
  for (const std::string& transport : server.transports) out.add_transports(transport);
  for (const std::string& warning : info.warnings) out.add_warnings(warning);
  for (const ShardPlace& place : info.layout) {
    v1::Shard& shard = *out.add_layout();
    shard.set_replica(static_cast<uint32_t>(place.replica));
    shard.set_shard(static_cast<uint32_t>(place.shard));
    shard.set_device(place.device);
    shard.set_vocab_begin(static_cast<uint32_t>(place.vocab_begin));
    shard.set_vocab_end(static_cast<uint32_t>(place.vocab_end));
  }
}

void Fill(const SameHostAccess::Info& local, v1::LocalAccess& out) {
  out.set_boot_id(local.boot_id);
  out.set_grpc_path(local.grpc_path);
  out.set_control_path(local.control_path);
  out.set_shared_memory(local.shared_memory);
  out.set_cuda_ipc(local.cuda_ipc);
}

constexpr uint32_t kProbeRowsMax = 64;

v1::VerifyResponse ToProto(const VerifyReport& report, const HeadInfo& info) {
  v1::VerifyResponse out;
  out.set_passed(report.passed);
  out.set_rows(static_cast<uint32_t>(report.rows));
  out.set_logprob_difference_max(report.logprob_difference_max);
  out.set_entropy_difference_max(report.entropy_difference_max);
  out.set_logprob_tolerance(report.logprob_tolerance);
  out.set_entropy_tolerance(report.entropy_tolerance);
  out.set_logit_stddev(report.logit_stddev);
  out.set_weights_version(report.weights_version);
  out.set_engine(info.engine);
  out.set_seconds(report.seconds);
  return out;
}

/// Returns an id for the log lines of a Verify call, which has no request_id.
std::string NewLogId() {
  static std::atomic<int64_t> last = 0;
  return absl::StrCat("verify-", ++last);
}

/// gRPC calls OnCancel and OnDone only after StartVerify has returned, and it calls OnDone last.
class VerifyCall final : public grpc::ServerUnaryReactor {
 public:
  VerifyCall(ScoreHandler& handler, grpc::CallbackServerContext& context,
             grpc::ByteBuffer& response)
      : handler_(handler),
        context_(context),
        response_(response),
        received_(handler.clock().Now()),
        deadline_(CallInfoOf(context, handler.access(), handler.clock()).deadline) {
    handler_.work().Begin();
  }

  void Start(const grpc::ByteBuffer& request) {
    if (const absl::Status status = Run(request); !status.ok()) Reply(status);
  }

  /// Is called when the client left, the deadline passed, or the server's grace period ended.
  void OnCancel() override { stop_->store(true); }

  void OnDone() override {
    handler_.work().End();
    delete this;
  }

 private:
  absl::Status Run(const grpc::ByteBuffer& request) {
    v1::VerifyRequest message;
    LOGPROBD_RETURN_IF_ERROR(ParseSmallMessage(request, message));
    if (message.rows() > kProbeRowsMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("rows: ", message.rows(), ", must be in [0, ", kProbeRowsMax, "]"));
    }
    if (handler_.refuses_new()) return absl::UnavailableError("the server is shutting down");
    LOGPROBD_ASSIGN_OR_RETURN(head_, handler_.heads().Find(message.head()));
    if (!head_->ready()) {
      return absl::UnavailableError(
          absl::StrCat("head \"", head_->info()->name, "\" is not ready"));
    }
    VerifyOptions options;
    options.stop = stop_;
    options.deadline = deadline_;
    if (message.rows() != 0) options.rows = static_cast<int32_t>(message.rows());
    if (message.seed() != 0) options.seed = message.seed();
    head_->Verify(options, [this](absl::StatusOr<VerifyReport> report) {
      if (report.ok()) response_ = SerializeMessage(ToProto(*report, *head_->info()));
      Reply(report.status());
    });
    return absl::OkStatus();
  }

  void Reply(absl::Status status) {
    const absl::Time now = handler_.clock().Now();
    status = LateIfDue(std::move(status), deadline_, now,
                       "the deadline passed before the probe was verified");
    const std::string head = head_ == nullptr ? "" : head_->info()->name;
    handler_.metrics().RecordRequest(Metrics::Method::kVerify, head, status.code(),
                                     absl::ToDoubleSeconds(now - received_),
                                     Metrics::Transport::kTcp);
    std::string log_id;
    if (HasDetailsForLog(status)) {
      log_id = NewLogId();
      LogError("verify failed", {{"request_id", log_id},
                                 {"head", head},
                                 {"code", absl::StatusCodeToString(status.code())},
                                 {"reason", status.message()}});
    }
    AddRetryHint(status, context_);
    Finish(ToGrpcStatus(status, log_id));
  }

  ScoreHandler& handler_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer& response_;
  const absl::Time received_;
  const absl::Time deadline_;
  const std::shared_ptr<std::atomic<bool>> stop_ = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<ServedHead> head_;
};

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
    if (server.same_host.has_value()) Fill(*server.same_host, *answer.mutable_local());
    response = SerializeMessage(answer);
  }
  metrics.RecordRequest(Metrics::Method::kListHeads, "", status.code(),
                        absl::ToDoubleSeconds(clock.Now() - received), Metrics::Transport::kTcp);
  grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

grpc::ServerUnaryReactor* StartVerify(ScoreHandler& handler, grpc::CallbackServerContext& context,
                                      const grpc::ByteBuffer& request, grpc::ByteBuffer& response) {
  auto* call = new VerifyCall(handler, context, response);
  call->Start(request);
  return call;
}

}  // namespace logprobd
