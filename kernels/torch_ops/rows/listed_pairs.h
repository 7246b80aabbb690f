#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "kernels/torch_ops/types/linear_logprob.h"

namespace logprobd::torch_ops {

struct Pass;
struct Rows;

/// Pairs of a row and an id whose log-probabilities are requested, int64 [N] each. Undefined if
/// there are none.
struct ListedPairs {
  at::Tensor rows;
  at::Tensor ids;

  bool defined() const { return ids.defined(); }
  /// Returns the same pairs with rows and ids counted from `row` and `id`.
  ListedPairs RelativeTo(int64_t row, int64_t id) const;
};

/// Returns the pairs of inputs.candidate_ids; their rows are indices of all rows.
ListedPairs CandidatesOf(const LinearLogprobInputs& inputs);

/// Returns the same pairs with rows counted among `rows`, which are the valid rows or all rows. The
/// candidates of ignored rows get row -1.
ListedPairs CandidatesAmong(const Rows& rows, const Pass& pass);

/// Positions of pairs in a block of rows and columns, [N] each.
struct PairsInBlock {
  at::Tensor row;        ///< int64; an arbitrary row of the block if the pair is outside.
  at::Tensor column;     ///< int64; an arbitrary column of the block if the pair is outside.
  at::Tensor is_inside;  ///< bool
};

/// Finds `pairs`, which are counted from the block's first row and column, in a block of at least
/// one row and one column.
PairsInBlock FindPairs(const ListedPairs& pairs, int64_t num_rows, int64_t num_columns);

/// Numbers that describe the values of candidate_ids and candidate_offsets; 0 if there are no
/// candidates.
struct CandidateNumbers {
  int64_t min_id = 0;
  int64_t max_id = 0;
  // These depend on the order of the values, modulo 2^64, for comparison with other ranks.
  int64_t ids_checksum = 0;
  int64_t offsets_checksum = 0;  ///< 0 without offsets.
};

/// Starts to read the candidates, and returns a function that waits for the device to have read
/// them. While a CUDA graph is captured nothing is read. The function throws c10::ValueError for
/// offsets that do not increase from 0 to the number of ids. Checksums are 0 if the rank is alone.
std::function<CandidateNumbers()> StartReadingCandidates(const Pass& pass);

/// Throws c10::IndexError if a candidate is not an id of the vocabulary, whose size is known.
void CheckCandidateIds(const CandidateNumbers& numbers, const Pass& pass);

}  // namespace logprobd::torch_ops
