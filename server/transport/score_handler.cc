#include "server/transport/score_handler.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/base/score_request.h"
#include "server/transport/grpc_message.h"
#include "server/transport/wire_parser.h"
#include "server/validation/validate_request.h"

namespace logprobd {
namespace {

/// Returns the part of an error message that may be logged. For INVALID_ARGUMENT this is only the
/// name of the field, because the rest quotes values of the client.
absl::string_view LoggedMessage(const absl::Status& status) {
  const absl::string_view message = status.message();
  return absl::IsInvalidArgument(status) ? message.substr(0, message.find(':')) : message;
}

/// Returns the transport of a request's rows. The metrics count its message and its response under
/// the same transport.
Metrics::Transport TransportOf(const ScoreRequest& request) {
  return request.shared_memory.has_value() ? Metrics::Transport::kShm
         : request.cuda_ipc.has_value()    ? Metrics::Transport::kCudaIpc
                                           : Metrics::Transport::kTcp;
}

/// Returns the size in bytes of the rows that are not in the message.
int64_t BytesElsewhere(const ScoreRequest& request) {
  return request.shared_memory.has_value() ? request.shared_memory->bytes
         : request.cuda_ipc.has_value()    ? request.cuda_ipc->memory.bytes
                                           : 0;
}

}  // namespace

/// The state of a request from its arrival to its reply.
struct ScoreHandler::Pending {
  std::string request_id;
  std::string client_id;
  std::string
      head;  ///< The name in the request until the head is found, then the name of the head.
  uint64_t chunk_id = 0;
  TraceContext trace_context;
  bool trace = false;
  Metrics::Method method = Metrics::Method::kScore;
  Metrics::Transport transport = Metrics::Transport::kTcp;
  absl::Time received;
  absl::Time deadline;
  AnswerBudget::Hold hold;
  ReplyCallback done;
};

std::optional<Submission> ScoreHandler::Start(const grpc::ByteBuffer& message, const CallInfo& call,
                                              Metrics::Method method, ReplyCallback done) {
  const absl::Time received = clock_.Now();
  PayloadSlices slices = SlicesOf(message);
  ParsedScoreRequest parsed = ParseScoreRequest(slices.pieces, std::move(slices.owner));

  ScoreRequest& request = parsed.request;
  request.client_id = call.client_id;
  request.sub_client_id = call.sub_client_id;
  request.client_share = call.client_share;
  request.deadline = call.deadline;
  request.received = received;
  request.message_bytes = slices.bytes;
  if (request.trace_context.empty()) request.trace_context = call.trace_context;
  auto pending = std::make_shared<Pending>();
  pending->request_id = request.request_id;
  pending->client_id = call.client_id;
  pending->head = request.head;
  pending->chunk_id = request.chunk_id;
  pending->trace_context = request.trace_context;
  pending->trace = request.trace;
  pending->method = method;
  pending->transport = TransportOf(request);
  pending->received = received;
  pending->deadline = call.deadline;
  pending->done = std::move(done);

  metrics_.RecordReceived(pending->transport, slices.bytes);

  if (!call.access.ok()) {
    parsed.status = WithRejection(call.access, Rejection::kUnauthenticated);
  } else if (parsed.status.ok() && request.priority() < call.priority_max) {
    parsed.status = WithRejection(
        absl::PermissionDeniedError("priority: above that which the caller's token or certificate "
                                    "allows"),
        Rejection::kPermissionDenied);
  }
  absl::StatusOr<Submission> submission =
      parsed.status.ok() ? Submit(std::move(request), pending)
                         : absl::StatusOr<Submission>(std::move(parsed.status));
  metrics_.RecordStage(Metrics::Stage::kReceive, absl::ToDoubleSeconds(clock_.Now() - received));
  if (!submission.ok()) {
    metrics_.RecordRejection(RejectionOf(submission.status()));
    Answer(*pending, std::move(submission).status());
    return std::nullopt;
  }
  return *std::move(submission);
}

absl::Status ScoreHandler::FindPayload(ScoreRequest& request) const {
  if (!request.shared_memory.has_value() && !request.cuda_ipc.has_value()) return absl::OkStatus();
  if (same_host_ == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        request.shared_memory.has_value() ? "shared_memory" : "cuda_ipc",
        ": this server has no Unix socket (see its flag --local); send the rows in `hidden`"));
  }
  LOGPROBD_ASSIGN_OR_RETURN(request.hidden, request.shared_memory.has_value()
                                                ? same_host_->Find(*request.shared_memory)
                                                : same_host_->Find(*request.cuda_ipc));
  metrics_.RecordReceived(TransportOf(request), BytesElsewhere(request));
  return absl::OkStatus();
}

absl::StatusOr<Submission> ScoreHandler::Submit(ScoreRequest request,
                                                const std::shared_ptr<Pending>& pending) {
  if (refuses_new()) {
    return WithRejection(absl::UnavailableError("the server is shutting down"),
                         Rejection::kDraining);
  }
  LOGPROBD_ASSIGN_OR_RETURN(const std::shared_ptr<ServedHead> head, heads_.Find(request.head));
  const std::shared_ptr<const HeadInfo> info = head->info();
  pending->head = info->name;
  if (!head->ready()) {
    return WithRetryAfter(
        absl::UnavailableError(absl::StrCat("head \"", pending->head, "\" is not ready")),
        absl::Seconds(1));
  }
  LOGPROBD_RETURN_IF_ERROR(ValidateRequest(request, *info));
  LOGPROBD_RETURN_IF_ERROR(FindPayload(request));
  LOGPROBD_ASSIGN_OR_RETURN(
      pending->hold, answers_.Take(pending->client_id, AnswerBytes(request), request.client_share));
  LOGPROBD_ASSIGN_OR_RETURN(
      const RequestTicket ticket,
      head->Submit(std::move(request), [this, pending](absl::StatusOr<ScoreResult> result) {
        Answer(*pending, std::move(result));
      }));
  return Submission{head, ticket};
}

void ScoreHandler::Answer(Pending& pending, absl::StatusOr<ScoreResult> result) {
  const absl::Time now = clock_.Now();
  ScoreReply reply;
  reply.request_id = std::move(pending.request_id);
  reply.chunk_id = pending.chunk_id;
  reply.transport = pending.transport;
  if (result.ok()) {
    reply.result = *std::move(result);
    reply.hold = std::move(pending.hold);
    if (pending.trace) {
      reply.trace = ReplyTrace{.context = pending.trace_context,
                               .received = pending.received,
                               .received_wall = WallNow() - (now - pending.received),
                               .replied = now};
    }
  } else {
    reply.status = LateIfDue(std::move(result).status(), pending.deadline, now,
                             "the deadline passed before the response was ready");
    pending.hold.Release();
    LogFailure(pending, reply);
  }
  metrics_.RecordRequest(pending.method, pending.head, reply.status.code(),
                         absl::ToDoubleSeconds(now - pending.received), pending.transport);
  std::move(pending.done)(std::move(reply));
}

void ScoreHandler::LogFailure(const Pending& pending, const ScoreReply& reply) {
  LogLevel level = LogLevel::kDebug;
  int64_t suppressed = 0;
  if (HasDetailsForLog(reply.status)) {  // the fault is the server's, not the client's
    const std::optional<int64_t> admitted = error_lines_.Admit();
    if (!admitted.has_value()) return;
    level = LogLevel::kError;
    suppressed = *admitted;
  }
  std::vector<LogField> fields = {{"request_id", reply.request_id},
                                  {"client", pending.client_id},
                                  {"head", pending.head},
                                  {"code", absl::StatusCodeToString(reply.status.code())},
                                  {"reason", LoggedMessage(reply.status)},
                                  {"lines_suppressed", suppressed}};
  if (!pending.trace_context.empty()) {
    fields.emplace_back("trace_id", pending.trace_context.trace_id());
  }
  Log(level, "request failed", fields);
}

void ScoreHandler::RecordReplied(absl::Time answered, int64_t sent_bytes,
                                 Metrics::Transport transport) {
  metrics_.RecordStage(Metrics::Stage::kReply, absl::ToDoubleSeconds(clock_.Now() - answered));
  metrics_.RecordSent(transport, sent_bytes);
}

}  // namespace logprobd
