#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/weights/head_weights.h"

namespace logprobd {

/// A weight that never returns two values of a row. A file may be read several times: to compute
/// its sha256, for each replica, and for Verify. The first read of a row keeps a tag of its bytes,
/// a message authentication code with a key of this object, and every later read compares it.
class SteadyWeights final : public HeadWeights {
 public:
  /// Returns INTERNAL if the system provides no random key or libcrypto fails.
  static absl::StatusOr<std::unique_ptr<SteadyWeights>> Create(
      std::unique_ptr<const HeadWeights> weights);

  const HeadInfo& info() const override { return weights_->info(); }
  const std::vector<float>& bias() const override { return weights_->bias(); }
  absl::Span<const std::byte> stored_bias() const override { return weights_->stored_bias(); }
  int64_t memory_bytes() const override { return weights_->memory_bytes(); }

  /// Also returns DATA_LOSS if a row is not the same as at its first read.
  absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                        int64_t row_pitch_bytes) const override;

 private:
  using Key = std::array<unsigned char, 16>;

  SteadyWeights(std::unique_ptr<const HeadWeights> weights, const Key& key);

  const std::unique_ptr<const HeadWeights> weights_;
  const Key key_;
  mutable std::vector<std::atomic<uint64_t>> tags_;  // [vocab_rows]; 0 before the first read
};

}  // namespace logprobd
