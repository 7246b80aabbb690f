#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>

#include "absl/status/status.h"
#include "client/cpp/chunk_plan.h"
#include "client/cpp/score_args.h"
#include "client/cpp/score_result.h"

namespace logprobd::client {

/// Joins the answers of a call's chunks, in any order of arrival, into one result. Not thread-safe.
class ResultMerger {
 public:
  /// `args` and `plan` must outlive the merger.
  ResultMerger(const ScoreArgs& args, const ChunkPlan& plan);

  /// Takes the encoded ScoreResponse of a chunk. Errors:
  ///   INTERNAL  not a ScoreResponse, or an output of the wrong size.
  ///   ABORTED   other weights than an earlier chunk's.
  absl::Status Add(const Chunk& chunk, const grpc::ByteBuffer& body);

  /// The joined result, once every chunk has been added.
  ScoreResult Finish();

 private:
  void SumSegments();

  const ScoreArgs& args_;
  const ChunkPlan& plan_;
  ScoreResult result_;
  int64_t chunks_added_ = 0;
};

}  // namespace logprobd::client
