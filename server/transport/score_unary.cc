#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

#include "server/transport/call_info.h"
#include "server/transport/grpc_status.h"
#include "server/transport/score_call.h"

namespace logprobd {
namespace {

/// gRPC calls OnCancel and OnDone only after StartScoreCall has returned, and OnDone last: until
/// the request is answered (Finish), `this` lives.
class ScoreUnary final : public grpc::ServerUnaryReactor {
 public:
  ScoreUnary(ScoreHandler& handler, grpc::CallbackServerContext& context,
             grpc::ByteBuffer& response)
      : handler_(handler), context_(context), response_(response) {
    handler_.work().Begin();
  }

  void Start(const grpc::ByteBuffer& request) {
    submission_ =
        handler_.Start(request, FactsOf(context_, handler_.clock()), Metrics::Method::kScore,
                       [this](ScoreReply reply) { Reply(std::move(reply)); });
  }

  void OnCancel() override {
    is_cancelled_ = true;
    if (submission_.has_value()) {
      submission_->Cancel();
    }
  }

  void OnDone() override {
    handler_.RecordReplied(answered_, is_cancelled_ ? 0 : answer_bytes_, transport_);
    hold_.Release();
    handler_.work().End();
    delete this;
  }

 private:
  void Reply(ScoreReply reply) {
    answered_ = handler_.clock().Now();
    transport_ = reply.transport;
    if (!reply.status.ok()) {
      AddRetryHint(reply.status, context_);
      Finish(ToGrpcStatus(reply.status));
      return;
    }
    hold_ = std::move(reply.hold);
    grpc::ByteBuffer message = EncodeScoreReply(std::move(reply));
    response_.Swap(&message);  // a ByteBuffer does not move
    answer_bytes_ = static_cast<int64_t>(response_.Length());
    Finish(grpc::Status::OK);
  }

  ScoreHandler& handler_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer& response_;
  std::optional<Submission> submission_;
  absl::Time answered_;
  int64_t answer_bytes_ = 0;
  Metrics::Transport transport_ = Metrics::Transport::kTcp;
  AnswerBudget::Hold hold_;
  std::atomic<bool> is_cancelled_ = false;
};

}  // namespace

grpc::ServerUnaryReactor* StartScoreCall(ScoreHandler& handler,
                                         grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& request,
                                         grpc::ByteBuffer& response) {
  auto* call = new ScoreUnary(handler, context, response);
  call->Start(request);
  return call;
}

}  // namespace logprobd
