#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

// Whether all ways in which an engine computes a dot product on a GPU give the same bits, and the
// file that remembers where they do. cuda_equal_sums.h computes the results that are compared.

namespace logprobd {

/// Bits of the results of one way to compute the same dot products. A way leaves the arrays empty
/// that it does not compute.
struct SumResults {
  std::string way;          ///< For example "listed logits (mma.sync)".
  std::string consequence;  ///< What follows if its results differ from `reference`, as a clause.
  size_t reference = 0;     ///< Index of the results that these must equal.
  std::vector<uint32_t> target_logits = {};  ///< [num_rows], fp32.
  std::vector<uint64_t> max_keys = {};       ///< [num_rows], kernels::LogitKey.
  std::vector<uint32_t> sums = {};           ///< [num_rows, num_tiles, 4], kernels::TileSums.
};

/// Returns which of `results` differ from their references, and what follows, as text for the log.
/// Returns an empty string if none differs. Arrays that one of the two leaves empty are not
/// compared.
std::string DescribeUnequalSums(absl::Span<const SumResults> results);

/// Returns the result of `check`, which is an empty string if all sums are equal. If the file in
/// folder `state_dir` says that a check has passed in `environment`, returns an empty string
/// without a call of `check`; if `check` passes, adds `environment` to the file. A failed check is
/// not remembered, so it is repeated at the next start.
///
/// `environment` is one line of UTF-8 that names everything on which the sums depend. If
/// `state_dir` is empty, nothing is remembered. A malformed file counts as empty and is replaced. A
/// file that cannot be read or written costs a log line and a check at each start, nothing else.
absl::StatusOr<std::string> CheckUnlessKnown(
    const std::string& state_dir, const std::string& environment,
    absl::FunctionRef<absl::StatusOr<std::string>()> check);

}  // namespace logprobd
