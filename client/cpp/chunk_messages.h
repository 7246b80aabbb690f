#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/chunk_plan.h"
#include "client/cpp/local_transport.h"
#include "client/cpp/score.h"

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

/// Joins the answers of a call's chunks, in any order of arrival, into one result. Not thread-safe.
class ResultMerger {
 public:
  /// `args` and `plan` must outlive the merger.
  ResultMerger(const ScoreArgs& args, const ChunkPlan& plan);

  /// Takes the encoded ScoreResponse of a chunk. Errors:
  ///   INTERNAL  not a ScoreResponse, or an output of the wrong size.
  ///   ABORTED   other weights than an earlier chunk's.
  absl::Status Add(const Chunk& chunk, const grpc::ByteBuffer& body);

  /// As Add, but `keeps` says whether an answer of a version is taken; a chunk may come again, and
  /// its last answer counts. Returns what `keeps` did. INTERNAL as Add, and the errors of `keeps`.
  absl::StatusOr<bool> Offer(
      const Chunk& chunk, const grpc::ByteBuffer& body,
      absl::FunctionRef<absl::StatusOr<bool>(uint64_t weights_version)> keeps);

  /// Chunks whose answer is of another version than `weights_version`. All chunks have been added.
  std::vector<const Chunk*> OtherThan(uint64_t weights_version) const;

  /// The joined result, once every chunk has been added.
  ScoreResult Finish();

 private:
  /// What adds up over the chunks.
  struct Part {
    bool is_added = false;
    uint64_t weights_version = 0;
    int64_t ignored_rows = 0;
    int64_t nonfinite_rows = 0;
  };

  void SumSegments();

  const ScoreArgs& args_;
  const ChunkPlan& plan_;
  ScoreResult result_;
  std::vector<Part> parts_;  // of each chunk of the plan
};

}  // namespace logprobd::client
