#pragma once

#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/transport/score_handler.h"

namespace logprobd {

/// Answers a unary Score call. gRPC owns the returned reactor.
grpc::ServerUnaryReactor* StartScoreCall(ScoreHandler& handler,
                                         grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& request,
                                         grpc::ByteBuffer& response);

/// Answers a ScoreStream call. The stream holds at most `window` chunks whose responses have not
/// been written, and reads no further chunk at this limit. This bounds its memory even when the
/// client stops reading. gRPC owns the returned reactor.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StartScoreStream(
    ScoreHandler& handler, grpc::CallbackServerContext& context, int window);

}  // namespace logprobd
