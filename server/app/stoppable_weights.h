#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// A weight whose reading ends with CANCELLED once `stop` is set: an engine that is loading it
/// gives up after the rows that it is reading. Both arguments must outlive it.
class StoppableWeights final : public HeadWeights {
 public:
  StoppableWeights(const HeadWeights& weights, const std::atomic<bool>& stop)
      : weights_(weights), stop_(stop) {}

  const HeadInfo& info() const override { return weights_.info(); }
  const std::vector<float>& bias() const override { return weights_.bias(); }

  absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                        int64_t row_pitch_bytes) const override {
    if (stop_.load(std::memory_order_relaxed)) {
      return absl::CancelledError("stopped while loading the weights");
    }
    return weights_.ReadRows(row_begin, row_end, out, row_pitch_bytes);
  }

 private:
  const HeadWeights& weights_;
  const std::atomic<bool>& stop_;
};

}  // namespace logprobd
