#pragma once

#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "logprobd/v1/scoring.grpc.pb.h"
#include "server/transport/info_calls.h"
#include "server/transport/score_handler.h"

namespace logprobd {

/// The Scoring service. All methods are raw: gRPC passes the bytes of a message, so that a
/// malformed message gets INVALID_ARGUMENT. Typed methods would answer UNIMPLEMENTED.
class ScoringService final
    : public v1::Scoring::WithRawCallbackMethod_Score<
          v1::Scoring::WithRawCallbackMethod_ScoreStream<
              v1::Scoring::WithRawCallbackMethod_ListHeads<
                  v1::Scoring::WithRawCallbackMethod_Verify<v1::Scoring::Service>>>> {
 public:
  /// References must outlive the service. See ScoreHandler for pointers that may be null.
  ScoringService(const HeadRegistry& heads, ServerInfo server, const AnswerBudget::Options& answers,
                 const SameHostAccess* same_host, const AccessList* access, Metrics& metrics,
                 const Clock& clock);

  grpc::ServerUnaryReactor* Score(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ScoreStream(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* ListHeads(grpc::CallbackServerContext* context,
                                      const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Verify(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;

  ScoreHandler& handler() { return handler_; }

 private:
  ScoreHandler handler_;
  const ServerInfo server_;
};

}  // namespace logprobd
