#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/combine/row_scores.h"
#include "kernels/fused/params.h"
#include "tests/unit/kernels/chunked/device_array.h"
#include "tests/unit/kernels/fused/fused_case.h"

namespace logprobd::testing {
namespace {

using kernels::kTileColumns;

constexpr uint16_t kOne = 0x3F80;  // bf16
constexpr uint16_t kTwo = 0x4000;

/// Device memory that is not filled from the host, for arrays that are too large for that.
class LargeMemory {
 public:
  explicit LargeMemory(int64_t bytes) {
    EXPECT_EQ(cudaMalloc(&data_, static_cast<size_t>(bytes)), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0, static_cast<size_t>(bytes)), cudaSuccess);
  }
  ~LargeMemory() { EXPECT_EQ(cudaFree(data_), cudaSuccess); }
  LargeMemory(const LargeMemory&) = delete;
  LargeMemory& operator=(const LargeMemory&) = delete;
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

class FusedEdgesTest : public FusedTest {};

// V * H and T * V exceed 2^31: with 32-bit offsets, the kernels would read or write elsewhere.
TEST_F(FusedEdgesTest, TheLastLogitOfTheLargestProblemIsFound) {
  constexpr int64_t kVocab = 1 << 20;
  constexpr int64_t kHidden = 2'176;  // V * H = 2.3e9
  constexpr int64_t kRows = 4'096;    // T * V = 4.3e9
  const int64_t num_tiles = kernels::NumTiles(kVocab);
  const LargeMemory weight(num_tiles * kTileColumns * kHidden * 2);
  const LargeMemory sums(num_tiles * kRows * int64_t{sizeof(kernels::TileSums)});
  // Every logit is 0 except the last token's, which is 1 * 2.
  ASSERT_EQ(cudaMemcpy(weight.as<uint16_t>() + (kVocab - 1) * kHidden + kHidden - 1, &kTwo, 2,
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  const DeviceArray<uint16_t> hidden(std::vector<uint16_t>(kRows * kHidden, kOne));
  const DeviceArray<float> scales(std::vector<float>(kRows, kernels::Log2Scale(1.0F)));
  const DeviceArray<int32_t> targets(std::vector<int32_t>(kRows, kVocab - 1));
  const DeviceArray<float> target_logits(std::vector<float>(kRows, -777.0F));
  const DeviceArray<uint64_t> max_keys(std::vector<uint64_t>(kRows, 0));
  const DeviceArray<kernels::RowNormalizer> normalizers(
      std::vector<kernels::RowNormalizer>{static_cast<size_t>(kRows), kernels::RowNormalizer{}});
  const DeviceArray<uint8_t> nonfinite(std::vector<uint8_t>(kRows, 7));
  const DeviceArray<float> logprob(std::vector<float>(kRows, 7.0F));
  const DeviceArray<float> entropy(std::vector<float>(kRows, 7.0F));
  const DeviceArray<int32_t> argmax_id(std::vector<int32_t>(kRows, 7));
  kernels::FusedPartialsParams params;
  params.num_rows = params.readable_rows = kRows;
  params.hidden_size = params.hidden_stride = params.weight_stride = kHidden;
  params.hidden = hidden.data();
  params.weight = weight.as<void>();
  params.vocab_size = kVocab;
  params.tile_end = num_tiles;
  params.log2_scales = scales.data();
  params.targets = targets.data();
  params.layout = kernels::PartialLayoutOf(kRows, num_tiles);
  params.sums = sums.as<kernels::TileSums>();
  params.target_logits = target_logits.data();
  params.max_keys = max_keys.data();
  kernels::RowScoresParams scores;
  scores.num_rows = kRows;
  scores.num_tiles = num_tiles;
  scores.vocab_size = kVocab;
  scores.layout = params.layout;
  scores.sums = params.sums;
  scores.max_keys = max_keys.data();
  scores.log2_scales = scales.data();
  scores.target_logits = target_logits.data();
  scores.normalizers = normalizers.data();
  scores.nonfinite = nonfinite.data();
  scores.logprob = logprob.data();
  scores.entropy = entropy.data();
  scores.argmax_id = argmax_id.data();

  ASSERT_EQ(LaunchPartials(params, nullptr), cudaSuccess);
  ASSERT_EQ(kernels::LaunchRowScores(scores, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  const double sum = static_cast<double>(kVocab - 1) + std::exp(2.0);
  const std::vector<float> logprobs = logprob.Read();
  const std::vector<float> entropies = entropy.Read();
  const std::vector<int32_t> ids = argmax_id.Read();
  for (const size_t row : {size_t{0}, size_t{4'095}}) {
    EXPECT_NEAR(logprobs[row], 2.0 - std::log(sum), 2e-6);
    EXPECT_NEAR(entropies[row], std::log(sum) - 2.0 * std::exp(2.0) / sum, 4e-6);
    EXPECT_EQ(ids[row], kVocab - 1);
  }
}

}  // namespace
}  // namespace logprobd::testing
