#include "server/transport/scoring_service.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "server/transport/score_calls.h"

namespace logprobd {
namespace {

/// Returns the smallest window of all heads, because a stream opens before its first chunk names a
/// head.
int StreamWindow(const HeadRegistry& heads) {
  const std::vector<std::shared_ptr<ServedHead>> served = heads.List();
  int window =
      served.empty() ? RequestLimits().stream_window : served[0]->info()->limits.stream_window;
  for (const std::shared_ptr<ServedHead>& head : served) {
    window = std::min(window, head->info()->limits.stream_window);
  }
  return std::max(window, 1);
}

}  // namespace

ScoringService::ScoringService(const HeadRegistry& heads, ServerInfo server,
                               const AnswerBudget::Options& answers,
                               const SameHostAccess* same_host, const AccessList* access,
                               Metrics& metrics, const Clock& clock)
    : handler_(heads, metrics, clock, answers, same_host, access), server_(std::move(server)) {}

grpc::ServerUnaryReactor* ScoringService::Score(grpc::CallbackServerContext* context,
                                                const grpc::ByteBuffer* request,
                                                grpc::ByteBuffer* response) {
  return StartScoreCall(handler_, *context, *request, *response);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ScoringService::ScoreStream(
    grpc::CallbackServerContext* context) {
  return StartScoreStream(handler_, *context, StreamWindow(handler_.heads()));
}

grpc::ServerUnaryReactor* ScoringService::ListHeads(grpc::CallbackServerContext* context,
                                                    const grpc::ByteBuffer* request,
                                                    grpc::ByteBuffer* response) {
  return StartListHeads(handler_.heads(), server_, handler_.metrics(), handler_.clock(), *context,
                        *request, *response);
}

grpc::ServerUnaryReactor* ScoringService::Verify(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  return StartVerify(handler_, *context, *request, *response);
}

}  // namespace logprobd
