#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/base/served_head.h"
#include "server/metrics/metrics.h"

namespace logprobd::testing {

struct NullHeadOptions {
  /// Reads every byte of the hidden rows: a row's logprob is its RowChecksum (row_checksum.h).
  bool reads = false;
  /// Threads that read beside the engine's own: one reads some 5 GB/s, a GPU 55.
  int32_t reading_threads = 7;
};

/// A head with the real Batcher over an engine that computes nothing: what is left is the cost of
/// everything around the engine. Hidden size 4,096, vocabulary 151,936. Scores are 0 but for the
/// checksums of an engine that reads.
absl::StatusOr<std::shared_ptr<ServedHead>> MakeNullHead(const Clock& clock, Metrics& metrics,
                                                         const NullHeadOptions& options = {});

}  // namespace logprobd::testing
