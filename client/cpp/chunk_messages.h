#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/chunk_plan.h"
#include "client/cpp/local_transport.h"
#include "client/cpp/score.h"

namespace logprobd::client {

/// Encodes one chunk of `args` as a ScoreRequest: a slice with all small fields, then a slice that
/// refers to the caller's hidden rows. `hold` is released when gRPC no longer reads those rows.
grpc::ByteBuffer EncodeScoreRequest(const ScoreArgs& args, const ChunkPlan& plan,
                                    const Chunk& chunk, std::shared_ptr<void> hold);

/// Behaves like EncodeScoreRequest, but the request refers to rows in the shared or GPU memory that
/// `placement` describes.
grpc::ByteBuffer EncodeSliceRequest(const ScoreArgs& args, const ChunkPlan& plan,
                                    const Chunk& chunk, const Placement& placement);

/// Returns the outputs to request: those of `args`, and those that the sums of segments require.
uint32_t RequestedOutputs(const ScoreArgs& args, const ChunkPlan& plan);

/// Joins the responses of a call's chunks, which may arrive in any order, into one result. Not
/// thread-safe.
class ResultMerger {
 public:
  /// `args` and `plan` must outlive the merger.
  ResultMerger(const ScoreArgs& args, const ChunkPlan& plan);

  /// Adds the encoded ScoreResponse of a chunk if `keeps` accepts a response of that version, and
  /// returns its result. A chunk may be added again; the latest response counts. Returns INTERNAL
  /// if `body` is not a ScoreResponse or an output has the wrong size, and the errors of `keeps`.
  absl::StatusOr<bool> Add(const Chunk& chunk, const grpc::ByteBuffer& body,
                           absl::FunctionRef<absl::StatusOr<bool>(uint64_t weights_version)> keeps);

  /// Returns the chunks that another version than `weights_version` scored. Must be called after
  /// all chunks have been added.
  std::vector<const Chunk*> OtherThan(uint64_t weights_version) const;

  /// Returns the joined result. Must be called once, after all chunks have been added.
  ScoreResult Finish();

 private:
  /// Properties of one chunk's response.
  struct Part {
    uint64_t weights_version = 0;
    int64_t ignored_rows = 0;
    int64_t nonfinite_rows = 0;
    std::optional<RequestTrace> trace;
  };

  void SumSegments();

  const ScoreArgs& args_;
  const ChunkPlan& plan_;
  ScoreResult result_;
  std::vector<Part> parts_;  // one per chunk of the plan
};

}  // namespace logprobd::client
