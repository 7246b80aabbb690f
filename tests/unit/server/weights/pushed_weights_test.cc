#include "server/weights/pushed_weights.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <memory>
#include <numeric>
#include <thread>
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

/// Returns how much memory of this process is not swapped out or untouched.
int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total_pages = 0;
  int64_t resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * sysconf(_SC_PAGESIZE);
}

class PushedWeightsTest : public ::testing::Test {
 protected:
  PushedWeightsTest() : weights_(Make(/*has_bias=*/false)) {
    std::iota(values_.begin(), values_.end(), 1.0F);
  }

  static std::shared_ptr<PushedWeights> Make(bool has_bias) {
    HeadInfo info;
    info.weights_version = 7;
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

  PushedRows Rows(int64_t begin, int64_t end) const {
    return {.row_begin = begin, .num_rows = end - begin, .pieces = {Bytes(begin, end)}};
  }

  /// Returns elements [begin, end) of a bias.
  PushedRows Bias(int64_t begin, int64_t end) const {
    return {.row_begin = begin,
            .num_rows = end - begin,
            .is_bias = true,
            .pieces = {Bytes(0, kRows).subspan(static_cast<size_t>(begin * 4),
                                               static_cast<size_t>((end - begin) * 4))}};
  }

  absl::Status Add(int64_t begin, int64_t end) { return weights_->Add(Rows(begin, end)); }
  int64_t rows_received() const { return weights_->progress().rows; }

  std::vector<float> values_ = std::vector<float>(kRows * kHidden);
  std::shared_ptr<PushedWeights> weights_;
};

TEST_F(PushedWeightsTest, IsCompleteOnceEveryRowHasArrivedInWhateverOrder) {
  EXPECT_EQ(rows_received(), 0);
  for (const auto& [begin, end, received] : std::vector<std::array<int64_t, 3>>{
           {6, 8, 2}, {0, 2, 4}, {3, 4, 5}, {1, 7, 8}, {9, 10, 9}}) {
    ASSERT_TRUE(Add(begin, end).ok());
    EXPECT_EQ(rows_received(), received);
    EXPECT_FALSE(weights_->is_complete());
  }

  ASSERT_TRUE(Add(8, 9).ok());

  EXPECT_TRUE(weights_->is_complete());
  EXPECT_EQ(rows_received(), kRows);
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

  EXPECT_EQ(rows_received(), 8);
  EXPECT_TRUE(Add(8, 10).ok());
  EXPECT_TRUE(weights_->is_complete());
}

TEST_F(PushedWeightsTest, ComparesTheRowsThatHaveArrivedAndAddsNone) {
  ASSERT_TRUE(Add(2, 6).ok());

  EXPECT_TRUE(weights_->Compare(Rows(0, 8)).ok());

  EXPECT_EQ(rows_received(), 4);
  values_[7 * kHidden] = 0;  // has not arrived
  EXPECT_TRUE(weights_->Compare(Rows(0, 8)).ok());
  values_[5 * kHidden] = 0;
  EXPECT_THAT(weights_->Compare(Rows(0, 8)),
              Fails(absl::StatusCode::kDataLoss, "rows 2 to 6 differ"));
  EXPECT_THAT(weights_->Compare(Rows(9, 11)), Fails(absl::StatusCode::kInvalidArgument, "rows: 2"));
}

TEST_F(PushedWeightsTest, TakesRowsInPiecesThatAreCutAnywhere) {
  const absl::Span<const std::byte> bytes = Bytes(1, 9);
  const std::byte wrong{0x55};  // no byte of the rows
  ASSERT_TRUE(Add(4, 6).ok());
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const size_t next = std::min(cut + 5, bytes.size());
    PushedRows rows = Rows(1, 9);
    rows.pieces = {bytes.first(cut), bytes.subspan(cut, next - cut), bytes.subspan(next)};

    ASSERT_TRUE(weights_->Add(rows).ok());
    ASSERT_TRUE(weights_->Compare(rows).ok());

    ASSERT_EQ(rows_received(), 8);
    std::vector<float> out(8 * kHidden);
    ASSERT_TRUE(weights_->ReadRows(1, 9, reinterpret_cast<std::byte*>(out.data()), kRowBytes).ok());
    ASSERT_TRUE(std::equal(out.begin(), out.end(), values_.begin() + kHidden));
    if (cut < bytes.size()) {
      rows.pieces = {bytes.first(cut), absl::MakeConstSpan(&wrong, 1), bytes.subspan(cut + 1)};
      ASSERT_FALSE(weights_->Compare(rows).ok());
    }
    weights_ = Make(/*has_bias=*/false);
  }
}

TEST_F(PushedWeightsTest, ReportsItsVersionAndHowManyRowsHaveArrived) {
  ASSERT_TRUE(Add(2, 6).ok());

  const PushedVersion progress = weights_->progress();

  EXPECT_EQ(progress.version, 7U);
  EXPECT_EQ(progress.rows, 4);
  EXPECT_EQ(progress.vocab_rows, kRows);
}

TEST_F(PushedWeightsTest, CallsAtOnceAddRowsOfWhichSomeAreTheSame) {
  for (int attempt = 0; attempt < 200; ++attempt) {
    weights_ = Make(/*has_bias=*/false);
    std::vector<std::thread> calls;
    for (const auto& [begin, end] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 7}, {3, kRows}, {0, kRows}, {5, 6}}) {
      calls.emplace_back([this, begin = begin, end = end] { EXPECT_TRUE(Add(begin, end).ok()); });
    }
    for (std::thread& call : calls) {
      call.join();
    }

    ASSERT_TRUE(weights_->is_complete());
    std::vector<float> out(values_.size());
    ASSERT_TRUE(
        weights_->ReadRows(0, kRows, reinterpret_cast<std::byte*>(out.data()), kRowBytes).ok());
    EXPECT_EQ(out, values_);
  }
}

TEST(PushedWeightsLargeTest, OfCallsAtOnceWhoseRowsDifferOneFails) {
  HeadInfo info;
  info.hidden_size = 4'096;
  info.vocab_size = info.vocab_rows = 256;
  info.dtype = Dtype::kBf16;
  info.weight_bytes = int64_t{2} << 20;  // copying takes long enough for calls to overlap
  for (int attempt = 0; attempt < 50; ++attempt) {
    const auto weights = *PushedWeights::Create(info);
    std::vector<std::thread> calls;
    std::atomic<int> num_added = 0;
    for (int value = 1; value < 4; ++value) {
      calls.emplace_back([&, value] {
        const std::vector<std::byte> bytes(static_cast<size_t>(info.weight_bytes),
                                           std::byte(value));
        num_added += static_cast<int>(
            weights->Add({.row_begin = 0, .num_rows = 256, .pieces = {bytes}}).ok());
      });
    }
    for (std::thread& call : calls) {
      call.join();
    }

    ASSERT_EQ(num_added, 1);
    EXPECT_TRUE(weights->is_complete());
  }
}

TEST_F(PushedWeightsTest, ACallWhoseRowsDifferLeavesNoneOfItsRows) {
  ASSERT_TRUE(Add(4, 5).ok());
  values_[4 * kHidden] = 0;

  EXPECT_FALSE(Add(0, kRows).ok());

  EXPECT_EQ(rows_received(), 1);
  EXPECT_TRUE(Add(5, kRows).ok());  // no call copies these rows any more
}

TEST(PushedWeightsMemoryTest, TheSystemCountsTheMemoryBeforeRowsArrive) {
  HeadInfo info;
  info.hidden_size = 4'096;
  info.vocab_size = info.vocab_rows = 8'192;
  info.dtype = Dtype::kBf16;
  info.weight_bytes = int64_t{64} << 20;
  const int64_t before = ResidentBytes();

  const auto weights = PushedWeights::Create(info);

  ASSERT_TRUE(weights.ok());
  EXPECT_GE(ResidentBytes() - before, info.weight_bytes);
}

TEST_F(PushedWeightsTest, RefusesRowsOutsideTheWeightAndOtherSizes) {
  const auto bytes = Bytes(0, 1);
  for (const auto& [begin, rows] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 1}, {0, 0}, {10, 1}, {0, 11}, {INT64_MAX, 1}, {1, INT64_MAX}}) {
    EXPECT_THAT(weights_->Add({.row_begin = begin, .num_rows = rows, .pieces = {bytes}}),
                Fails(absl::StatusCode::kInvalidArgument, "must be rows of [0, 10)"));
  }
  EXPECT_THAT(weights_->Add({.row_begin = 0, .num_rows = 1, .pieces = {bytes.subspan(1)}}),
              Fails(absl::StatusCode::kInvalidArgument, "12 bytes, but 11"));
  EXPECT_EQ(rows_received(), 0);
}

TEST_F(PushedWeightsTest, NeedsTheBiasOfAHeadThatHasOne) {
  weights_ = Make(/*has_bias=*/true);
  ASSERT_TRUE(Add(0, kRows).ok());
  EXPECT_FALSE(weights_->is_complete());
  EXPECT_TRUE(weights_->bias().empty());

  ASSERT_TRUE(weights_->Add(Bias(4, kRows)).ok());
  ASSERT_TRUE(weights_->Add(Bias(0, 4)).ok());

  EXPECT_TRUE(weights_->is_complete());
  EXPECT_THAT(weights_->bias(), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10));
  EXPECT_EQ(weights_->stored_bias(), Bias(0, kRows).pieces[0]);
  EXPECT_THAT(weights_->Add(Bias(0, kRows + 1)),
              Fails(absl::StatusCode::kInvalidArgument, "bias: rows: 11 from row 0"));
  values_[2] = 0;
  EXPECT_THAT(weights_->Add(Bias(0, 4)),
              Fails(absl::StatusCode::kDataLoss, "bias: rows 0 to 4 differ"));
}

TEST_F(PushedWeightsTest, RefusesABiasOfAHeadThatHasNone) {
  EXPECT_THAT(weights_->Add(Bias(0, 1)), Fails(absl::StatusCode::kInvalidArgument, "is_bias: "));
}

}  // namespace
}  // namespace logprobd
