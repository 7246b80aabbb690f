#include "server/weights/pushed_weights.h"

#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kRows = 10;
constexpr int64_t kHidden = 3;
constexpr int64_t kRowBytes = kHidden * 4;

class PushedWeightsTest : public ::testing::Test {
 protected:
  PushedWeightsTest() : weights_(Make(/*has_bias=*/false)) {
    std::iota(values_.begin(), values_.end(), 1.0F);
  }

  static std::shared_ptr<PushedWeights> Make(bool has_bias) {
    HeadInfo info;
    info.hidden_size = kHidden;
    info.vocab_size = info.vocab_rows = kRows;
    info.dtype = Dtype::kF32;
    info.has_bias = has_bias;
    info.weight_bytes = kRows * kRowBytes;
    return *PushedWeights::Create(info);
  }

  /// Returns the bytes of rows [begin, end).
  absl::Span<const std::byte> Bytes(int64_t begin, int64_t end) const {
    return {reinterpret_cast<const std::byte*>(values_.data() + begin * kHidden),
            static_cast<size_t>((end - begin) * kRowBytes)};
  }

  absl::Status Add(int64_t begin, int64_t end) {
    return weights_->AddRows(begin, end - begin, Bytes(begin, end));
  }

  std::vector<float> values_ = std::vector<float>(kRows * kHidden);
  std::shared_ptr<PushedWeights> weights_;
};

TEST_F(PushedWeightsTest, IsCompleteOnceEveryRowHasArrivedInWhateverOrder) {
  EXPECT_EQ(weights_->rows_received(), 0);
  for (const auto& [begin, end, received] : std::vector<std::array<int64_t, 3>>{
           {6, 8, 2}, {0, 2, 4}, {3, 4, 5}, {1, 7, 8}, {9, 10, 9}}) {
    ASSERT_TRUE(Add(begin, end).ok());
    EXPECT_EQ(weights_->rows_received(), received);
    EXPECT_FALSE(weights_->is_complete());
  }

  ASSERT_TRUE(Add(8, 9).ok());

  EXPECT_TRUE(weights_->is_complete());
  EXPECT_EQ(weights_->rows_received(), kRows);
}

TEST_F(PushedWeightsTest, ReturnsTheRowsWithAnyPitch) {
  ASSERT_TRUE(Add(4, kRows).ok());
  ASSERT_TRUE(Add(0, 4).ok());
  std::vector<float> out(2 * 5, -1.0F);

  ASSERT_TRUE(weights_->ReadRows(3, 5, reinterpret_cast<std::byte*>(out.data()), 5 * 4).ok());

  EXPECT_THAT(out, ElementsAre(10, 11, 12, -1, -1, 13, 14, 15, -1, -1));
  EXPECT_THAT(weights_->ReadRows(9, 11, nullptr, kRowBytes),
              Fails(absl::StatusCode::kOutOfRange, "rows 9 to 11"));
}

TEST_F(PushedWeightsTest, AcceptsRowsAgainOnlyIfTheyAreTheSame) {
  ASSERT_TRUE(Add(2, 6).ok());
  ASSERT_TRUE(Add(0, 8).ok());
  values_[5 * kHidden] = 0;

  EXPECT_THAT(Add(4, 10), Fails(absl::StatusCode::kDataLoss, "rows 4 to 8 differ"));

  EXPECT_EQ(weights_->rows_received(), 8);
  EXPECT_TRUE(Add(8, 10).ok());
  EXPECT_TRUE(weights_->is_complete());
}

TEST_F(PushedWeightsTest, RefusesRowsOutsideTheWeightAndOtherSizes) {
  const auto bytes = Bytes(0, 1);
  for (const auto& [begin, rows] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 1}, {0, 0}, {10, 1}, {0, 11}, {INT64_MAX, 1}, {1, INT64_MAX}}) {
    EXPECT_THAT(weights_->AddRows(begin, rows, bytes),
                Fails(absl::StatusCode::kInvalidArgument, "must be rows of [0, 10)"));
  }
  EXPECT_THAT(weights_->AddRows(0, 1, bytes.subspan(1)),
              Fails(absl::StatusCode::kInvalidArgument, "12 bytes, but 11"));
  EXPECT_EQ(weights_->rows_received(), 0);
}

TEST_F(PushedWeightsTest, NeedsTheBiasOfAHeadThatHasOne) {
  weights_ = Make(/*has_bias=*/true);
  ASSERT_TRUE(Add(0, kRows).ok());
  EXPECT_FALSE(weights_->is_complete());
  EXPECT_TRUE(weights_->bias().empty());
  const auto bytes = Bytes(0, kRows).first(kRows * 4);

  ASSERT_TRUE(weights_->AddBias(4, 6, bytes.subspan(4 * 4)).ok());
  ASSERT_TRUE(weights_->AddBias(0, 4, bytes.first(4 * 4)).ok());

  EXPECT_TRUE(weights_->is_complete());
  EXPECT_THAT(weights_->bias(), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10));
  EXPECT_EQ(weights_->stored_bias(), bytes);
}

TEST_F(PushedWeightsTest, RefusesABiasOfAHeadThatHasNone) {
  EXPECT_THAT(weights_->AddBias(0, 1, Bytes(0, 1).first(4)),
              Fails(absl::StatusCode::kInvalidArgument, "is_bias: "));
}

}  // namespace
}  // namespace logprobd
