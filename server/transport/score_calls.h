#pragma once

#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/transport/score_handler.h"

namespace logprobd {

/// Answers a unary Score call. gRPC owns what is returned.
grpc::ServerUnaryReactor* StartScoreCall(ScoreHandler& handler,
                                         grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& request,
                                         grpc::ByteBuffer& response);

/// Answers a ScoreStream call. At most `window` chunks are unanswered or answered but not yet
/// taken by the client; until then nothing more is read, which bounds what a stream holds, also
/// when its client stops reading. gRPC owns what is returned.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StartScoreStream(
    ScoreHandler& handler, grpc::CallbackServerContext& context, int window);

}  // namespace logprobd
