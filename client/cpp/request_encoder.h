#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "client/cpp/chunk_plan.h"
#include "client/cpp/local_transport.h"
#include "client/cpp/score_args.h"

namespace logprobd::client {

/// Encodes one chunk of `args` as a ScoreRequest: a slice with every small field, then a slice that
/// refers to the caller's hidden rows. `hold` is kept until gRPC reads those no longer.
grpc::ByteBuffer EncodeScoreRequest(const ScoreArgs& args, const ChunkPlan& plan,
                                    const Chunk& chunk, std::shared_ptr<void> hold);

/// As EncodeScoreRequest, but the request says where its rows lie: `placement` has a slice.
grpc::ByteBuffer EncodeSliceRequest(const ScoreArgs& args, const ChunkPlan& plan,
                                    const Chunk& chunk, const Placement& placement);

/// The outputs to ask of the server: those of `args`, and what local segment sums need.
uint32_t RequestedOutputs(const ScoreArgs& args, const ChunkPlan& plan);

}  // namespace logprobd::client
