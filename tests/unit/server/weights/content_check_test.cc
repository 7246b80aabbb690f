#include "server/weights/content_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/model_folder.h"

namespace logprobd {
namespace {

using ::testing::HasSubstr;
using testing::MakeTensor;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Returns the head of a model with these tensors.
std::unique_ptr<HeadWeights> OpenHead(const testing::ModelFolder& folder,
                                      const std::vector<testing::FileTensor>& tensors,
                                      int64_t vocab_size) {
  folder.WriteConfig("{\"hidden_size\": " + std::to_string(tensors[0].shape[1]) +
                     ", \"vocab_size\": " + std::to_string(vocab_size) + "}");
  folder.WriteTensors(tensors);
  auto head = OpenModelFolder(folder.path(), {});
  EXPECT_TRUE(head.ok()) << head.status();
  return std::move(head->weights);
}

TEST(ContentCheckTest, HashesTheStoredRowsAndThenTheStoredBias) {
  const testing::ModelFolder folder;
  const auto head = OpenHead(folder,
                             {MakeTensor("lm_head.weight", Dtype::kBf16, {2, 2}, {1, 2, 3, 4}),
                              MakeTensor("lm_head.bias", Dtype::kF16, {2}, {1, -2})},
                             2);

  const auto check = CheckContent(*head, {});

  ASSERT_TRUE(check.ok()) << check.status();
  // printf '\x80\x3f\x00\x40\x40\x40\x80\x40\x00\x3c\x00\xc0' | sha256sum
  EXPECT_EQ(check->sha256, "ce3ad25b638d1f4152a822c4856af6740113468ce69efc583d2c967cd7ad145b");
  EXPECT_EQ(check->nonfinite, "");
}

TEST(ContentCheckTest, HashesPaddingWithoutCheckingThatItIsFinite) {
  const testing::ModelFolder folder;
  const auto padded =
      OpenHead(folder, {MakeTensor("lm_head.weight", Dtype::kBf16, {2, 2}, {1, 2, kNan, kNan})}, 1);

  const auto check = CheckContent(*padded, {});

  ASSERT_TRUE(check.ok()) << check.status();
  EXPECT_EQ(check->nonfinite, "");
  EXPECT_NE(check->sha256, "");
  EXPECT_NE(
      check->sha256,
      CheckContent(
          *OpenHead(folder, {MakeTensor("lm_head.weight", Dtype::kBf16, {1, 2}, {1, 2})}, 1), {})
          ->sha256);
}

TEST(ContentCheckTest, FindsTheFirstNonfiniteElementAtAnyPosition) {
  constexpr int64_t kRows = 700;
  constexpr int64_t kHidden = 1'024;  // The rows fill more than one block in each dtype.
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const float bad : {kInfinity, -kInfinity, kNan}) {
      for (const auto& [row, column] :
           std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {1, 7}, {511, 1'023}, {699, 1'023}}) {
        std::vector<float> values(static_cast<size_t>(kRows * kHidden), 0.5F);
        values[static_cast<size_t>(row * kHidden + column)] = bad;
        values.back() = bad;
        const testing::ModelFolder folder;
        const auto head = OpenHead(
            folder, {MakeTensor("lm_head.weight", dtype, {kRows, kHidden}, values)}, kRows);

        const auto check = CheckContent(*head, {});

        ASSERT_TRUE(check.ok()) << check.status();
        EXPECT_EQ(check->nonfinite, "row " + std::to_string(row) + " column " +
                                        std::to_string(column) + " is NaN or Inf");
      }
    }
  }
}

TEST(ContentCheckTest, FindsANonfiniteBias) {
  const testing::ModelFolder folder;
  const auto head = OpenHead(folder,
                             {MakeTensor("lm_head.weight", Dtype::kBf16, {2, 2}, {1, 2, 3, 4}),
                              MakeTensor("lm_head.bias", Dtype::kF32, {2}, {1, kInfinity})},
                             2);

  EXPECT_EQ(CheckContent(*head, {})->nonfinite, "the bias of row 1 is NaN or Inf");
}

// Regression: a server started with a NaN in its weight and answered NaN for every row.
TEST(FiniteWeightsTest, RefusesTheReadThatMeetsANonfiniteValue) {
  constexpr int64_t kRows = 9;
  constexpr int64_t kHidden = 6;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const float bad : {kInfinity, -kInfinity, kNan}) {
      std::vector<float> values(static_cast<size_t>(kRows * kHidden), 0.5F);
      values[static_cast<size_t>(4 * kHidden + 5)] = bad;
      const testing::ModelFolder folder;
      const auto head =
          OpenHead(folder, {MakeTensor("lm_head.weight", dtype, {kRows, kHidden}, values)}, kRows);
      const FiniteWeights finite(*head, "/models/x", "mend it");

      for (const int64_t gap : {0, 8}) {  // engines leave gaps between the rows
        const int64_t pitch = kHidden * DtypeBytes(dtype) + gap;
        std::vector<std::byte> rows(static_cast<size_t>(kRows * pitch), std::byte{0xFF});

        const absl::Status all = finite.ReadRows(0, kRows, rows.data(), pitch);

        EXPECT_EQ(all,
                  absl::InvalidArgumentError("the head (source: /models/x) is not finite: row 4 "
                                             "column 5 is NaN or Inf; mend it"));
        EXPECT_TRUE(finite.ReadRows(0, 4, rows.data(), pitch).ok());
        EXPECT_TRUE(finite.ReadRows(5, kRows, rows.data(), pitch).ok());
        EXPECT_EQ(finite.ReadRows(4, 5, rows.data(), pitch), all);
      }
    }
  }
}

TEST(FiniteWeightsTest, RefusesANonfiniteBiasWithTheRowsToWhichItBelongs) {
  const testing::ModelFolder folder;
  const auto head =
      OpenHead(folder,
               {MakeTensor("lm_head.weight", Dtype::kBf16, {3, 2}, {1, 2, 3, 4, 5, 6}),
                MakeTensor("lm_head.bias", Dtype::kF32, {3}, {1, -kInfinity, 1})},
               3);
  const FiniteWeights finite(*head, "/models/x", "mend it");
  std::vector<std::byte> rows(12);

  EXPECT_TRUE(finite.ReadRows(0, 1, rows.data(), 4).ok());
  EXPECT_THAT(finite.ReadRows(1, 3, rows.data(), 4).message(),
              HasSubstr("the bias of row 1 is NaN or Inf"));
}

TEST(FiniteWeightsTest, AcceptsAnyPadding) {
  const testing::ModelFolder folder;
  const auto head = OpenHead(
      folder,
      {MakeTensor("lm_head.weight", Dtype::kBf16, {3, 2}, {1, 2, kNan, kNan, kInfinity, 1}),
       MakeTensor("lm_head.bias", Dtype::kF32, {3}, {1, kNan, kInfinity})},
      1);
  const FiniteWeights finite(*head, "/models/x", "mend it");
  std::vector<std::byte> rows(12);

  EXPECT_TRUE(finite.ReadRows(0, 3, rows.data(), 4).ok());
  EXPECT_TRUE(finite.ReadRows(2, 3, rows.data(), 4).ok());
}

TEST(FiniteWeightsTest, ReturnsTheErrorsOfItsWeight) {
  const testing::ModelFolder folder;
  const auto head =
      OpenHead(folder, {MakeTensor("lm_head.weight", Dtype::kBf16, {2, 2}, {1, 2, 3, 4})}, 2);
  const FiniteWeights finite(*head, "/models/x", "mend it");
  std::vector<std::byte> rows(12);

  EXPECT_TRUE(absl::IsOutOfRange(finite.ReadRows(0, 3, rows.data(), 4)));
}

TEST(ContentCheckTest, ReportsItsProgressAndStopsOnRequest) {
  const testing::ModelFolder folder;
  const auto head = OpenHead(
      folder, {testing::MakeRandomTensor("lm_head.weight", Dtype::kF32, {3'000, 256}, 1, 1)},
      3'000);
  std::vector<int64_t> done;
  const auto all = CheckContent(*head, [&](int64_t done_bytes, int64_t total_bytes) {
    EXPECT_EQ(total_bytes, 3'000 * 1'024);
    done.push_back(done_bytes);
    return true;
  });
  EXPECT_TRUE(all.ok());
  EXPECT_THAT(done, ::testing::ElementsAre(0, 1'024 << 10, 2'048 << 10, 3'000 << 10));

  const auto stopped =
      CheckContent(*head, [](int64_t done_bytes, int64_t) { return done_bytes == 0; });

  EXPECT_EQ(stopped.status().code(), absl::StatusCode::kCancelled);
}

TEST(ContentCheckTest, ReportsAFileThatChanges) {
  const testing::ModelFolder folder;
  const auto head =
      OpenHead(folder, {MakeTensor("lm_head.weight", Dtype::kBf16, {2, 2}, {1, 2, 3, 4})}, 2);
  folder.WriteFile("model.safetensors", "short");

  const auto check = CheckContent(*head, {});

  EXPECT_EQ(check.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(check.status().message(), HasSubstr("model.safetensors"));
}

}  // namespace
}  // namespace logprobd
