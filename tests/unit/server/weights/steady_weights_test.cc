#include "server/weights/steady_weights.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/unit/server/weights/status_matchers.h"

namespace logprobd {
namespace {

constexpr int64_t kRows = 50;
constexpr int64_t kHidden = 16;
constexpr int64_t kRowBytes = kHidden * 2;

/// Rows that a test can change between two reads.
class ChangingWeights final : public HeadWeights {
 public:
  explicit ChangingWeights(std::vector<std::byte>& bytes) : bytes_(bytes) {
    info_.tensor = "lm_head.weight";
    info_.hidden_size = kHidden;
    info_.vocab_size = info_.vocab_rows = kRows;
  }
  const HeadInfo& info() const override { return info_; }
  const std::vector<float>& bias() const override { return bias_; }
  absl::Status ReadRows(int64_t row_begin, int64_t row_end, std::byte* out,
                        int64_t row_pitch_bytes) const override {
    if (row_end > kRows) {
      return absl::OutOfRangeError("beyond");
    }
    for (int64_t row = row_begin; row < row_end; ++row) {
      std::copy_n(bytes_.data() + row * kRowBytes, kRowBytes,
                  out + (row - row_begin) * row_pitch_bytes);
    }
    return absl::OkStatus();
  }

 private:
  HeadInfo info_;
  std::vector<std::byte>& bytes_;
  std::vector<float> bias_;
};

class SteadyWeightsTest : public ::testing::Test {
 protected:
  absl::Status Read(int64_t begin, int64_t end, int64_t pitch = kRowBytes) {
    std::vector<std::byte> out(static_cast<size_t>((end - begin) * pitch));
    const absl::Status status = weights_->ReadRows(begin, end, out.data(), pitch);
    for (int64_t row = begin; row < end && status.ok(); ++row) {
      EXPECT_EQ(0, std::memcmp(out.data() + (row - begin) * pitch, bytes_.data() + row * kRowBytes,
                               kRowBytes));
    }
    return status;
  }

  std::vector<std::byte> bytes_ = std::vector<std::byte>(kRows * kRowBytes);
  std::unique_ptr<SteadyWeights> weights_ =
      *SteadyWeights::Create(std::make_unique<ChangingWeights>(bytes_));
};

TEST_F(SteadyWeightsTest, ReturnsTheSameRowsWithAnyRangeAndPitch) {
  EXPECT_THAT(Read(0, kRows), Succeeds());
  EXPECT_THAT(Read(3, 20, kRowBytes + 8), Succeeds());
  EXPECT_THAT(Read(49, kRows), Succeeds());
}

TEST_F(SteadyWeightsTest, RefusesARowThatChangedAfterItsFirstRead) {
  for (int64_t row = 0; row < kRows; ++row) {
    ASSERT_THAT(Read(0, kRows), Succeeds());
    std::byte& changed = bytes_[static_cast<size_t>(row * kRowBytes + row % kRowBytes)];
    changed ^= std::byte{1};

    EXPECT_THAT(Read(0, kRows), Fails(absl::StatusCode::kDataLoss,
                                      absl::StrCat("row ", row, " of lm_head.weight changed")));

    changed ^= std::byte{1};
  }
}

TEST_F(SteadyWeightsTest, ARowThatTakesTheBytesOfAnotherHasChanged) {
  bytes_[0] = std::byte{1};
  ASSERT_THAT(Read(0, 2), Succeeds());
  std::swap_ranges(bytes_.begin(), bytes_.begin() + kRowBytes, bytes_.begin() + kRowBytes);

  EXPECT_EQ(Read(0, 2).code(), absl::StatusCode::kDataLoss);
}

TEST_F(SteadyWeightsTest, ARowMayChangeBeforeItsFirstRead) {
  ASSERT_THAT(Read(0, 10), Succeeds());
  bytes_[10 * kRowBytes] = std::byte{1};

  EXPECT_THAT(Read(0, kRows), Succeeds());
}

TEST_F(SteadyWeightsTest, PassesOnErrors) {
  EXPECT_EQ(weights_->ReadRows(kRows, kRows + 1, bytes_.data(), kRowBytes).code(),
            absl::StatusCode::kOutOfRange);
}

TEST_F(SteadyWeightsTest, ThreadsReadTheSameRowsForTheFirstTime) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] { EXPECT_THAT(Read(0, kRows), Succeeds()); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace
}  // namespace logprobd
