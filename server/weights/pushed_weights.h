#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"
#include "server/base/weight_store.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// A weight in host memory whose rows arrive in any order. HeadWeights' functions may be called
/// once is_complete() has returned true; from then on nothing changes. Thread-safe.
class PushedWeights final : public HeadWeights {
 public:
  /// Takes the memory of the weight that `info` describes, and writes to all of it, so that the
  /// system counts it as used before rows arrive. Returns RESOURCE_EXHAUSTED if the system refuses
  /// it.
  static absl::StatusOr<std::shared_ptr<PushedWeights>> Create(HeadInfo info);

  /// Adds rows, or elements of the bias, as stored. Returns INVALID_ARGUMENT, which names the field
  /// of proto PushedRows, if they are outside the weight, have another size or belong to a bias
  /// that the head does not have; and DATA_LOSS if a row that was added before has other bytes.
  absl::Status Add(const PushedRows& sent);
  /// Returns what Add would return for the rows that were added before, and adds none.
  absl::Status Compare(const PushedRows& sent) const;

  /// Returns how many rows have been added, without the bias.
  PushedVersion progress() const;
  /// Returns whether all rows and the bias, if the head has one, have been added.
  bool is_complete() const;

  const HeadInfo& info() const override { return info_; }
  int64_t memory_bytes() const override { return info_.weight_bytes; }
  const std::vector<float>& bias() const override { return bias_values_; }
  absl::Span<const std::byte> stored_bias() const override;
  absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                        int64_t row_pitch_bytes) const override;

 private:
  /// Rows [begin, end).
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
    bool is_received = false;
  };

  /// Consecutive rows in memory, of which some have arrived. Rows in `received` never change.
  struct Tensor {
    absl::Status Check(const PushedRows& sent) const;
    /// Cuts rows [begin, end) into those that have been received and those that have not.
    std::vector<Range> Cut(int64_t begin, int64_t end) const;
    /// Returns DATA_LOSS if rows of `ranges` that have been received have other bytes.
    absl::Status Compare(const PushedRows& sent, const std::vector<Range>& ranges) const;
    /// Calls use(piece, offset) for the bytes sent of the rows of `range`, in the pieces in which
    /// they are, with their offset in the range, until it returns false, and returns that.
    template <typename Use>
    bool UseRows(const PushedRows& sent, const Range& range, const Use& use) const;
    bool IsCopying(int64_t begin, int64_t end) const;
    /// Adds rows [begin, end) to those received, and joins the range with those that it touches.
    void Receive(int64_t begin, int64_t end);
    int64_t rows_received() const;

    int64_t row_bytes = 0;
    int64_t num_rows = 0;
    std::unique_ptr<std::byte[]> bytes;
    absl::btree_map<int64_t, int64_t> received;  // the end of each range by its begin
    absl::btree_map<int64_t, int64_t> copying;   // ranges of calls of Add, which do not overlap
  };

  explicit PushedWeights(HeadInfo info) : info_(std::move(info)) {}

  absl::Status Check(const PushedRows& sent) const;
  const Tensor& TensorOf(const PushedRows& sent) const { return sent.is_bias ? bias_ : rows_; }

  const HeadInfo info_;
  mutable absl::Mutex mutex_;
  // `mutex_` guards `received` and `copying`, but not the bytes.
  Tensor rows_;
  Tensor bias_;                     // without rows if the head has no bias
  std::vector<float> bias_values_;  // set when the bias is complete
};

}  // namespace logprobd
