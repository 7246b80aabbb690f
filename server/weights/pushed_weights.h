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
#include "server/weights/head_weights.h"

namespace logprobd {

/// A weight in host memory whose rows arrive in any order. HeadWeights' functions may be called
/// once is_complete() has returned true; from then on nothing changes. Thread-safe.
class PushedWeights final : public HeadWeights {
 public:
  /// Takes the memory of the weight that `info` describes. Returns RESOURCE_EXHAUSTED if the system
  /// refuses it.
  static absl::StatusOr<std::shared_ptr<PushedWeights>> Create(HeadInfo info);

  /// Adds rows [row_begin, row_begin + num_rows), as stored. Returns INVALID_ARGUMENT, which names
  /// the field of proto PushedRows, if the rows are outside the weight or `bytes` has another size,
  /// and DATA_LOSS if a row that was added before has other bytes.
  absl::Status AddRows(int64_t row_begin, int64_t num_rows, absl::Span<const std::byte> bytes);
  /// Adds elements of the bias in the same way. Returns INVALID_ARGUMENT if the head has no bias.
  absl::Status AddBias(int64_t row_begin, int64_t num_rows, absl::Span<const std::byte> bytes);

  int64_t rows_received() const;
  /// Returns whether all rows and the bias, if the head has one, have been added.
  bool is_complete() const;

  const HeadInfo& info() const override { return info_; }
  int64_t memory_bytes() const override { return info_.weight_bytes; }
  const std::vector<float>& bias() const override { return bias_values_; }
  absl::Span<const std::byte> stored_bias() const override;
  absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                        int64_t row_pitch_bytes) const override;

 private:
  /// Consecutive rows in memory, of which some have arrived.
  struct Tensor {
    absl::Status Add(int64_t row_begin, int64_t num_added, absl::Span<const std::byte> added);
    int64_t rows_received() const;

    int64_t row_bytes = 0;
    int64_t num_rows = 0;
    std::unique_ptr<std::byte[]> bytes;          // not initialised
    absl::btree_map<int64_t, int64_t> received;  // the end of each range by its begin
  };

  explicit PushedWeights(HeadInfo info) : info_(std::move(info)) {}

  const HeadInfo info_;
  mutable absl::Mutex mutex_;
  Tensor rows_;                     // guarded by `mutex_` until it is complete
  Tensor bias_;                     // likewise; without rows if the head has no bias
  std::vector<float> bias_values_;  // set when the bias is complete
};

}  // namespace logprobd
