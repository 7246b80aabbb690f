#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/row_ops/compact_rows.h"
#include "tests/support/gpu_test.h"
#include "tests/unit/kernels/chunked/device_array.h"

namespace logprobd::kernels {
namespace {

using logprobd::testing::DeviceArray;

constexpr int64_t kIgnoreIndex = -100;
constexpr int64_t kFirstId = 40;
constexpr int64_t kEndId = 90;

struct Outputs {
  CompactedRows result;
  std::vector<int64_t> row_indices;
  std::vector<int64_t> valid_indices;
  int64_t num_compacted;  // the copy that kernels read
};

/// Runs the kernel. `first` and `third`, if not empty, are the first and third of the four
/// gradients.
Outputs Compact(const std::vector<int64_t>& targets, const std::vector<float>& first = {},
                const std::vector<float>& third = {}, int64_t third_stride = 1) {
  const DeviceArray<int64_t> target_array(targets);
  const DeviceArray<float> first_array(first);
  const DeviceArray<float> third_array(third);
  const DeviceArray<int64_t> row_indices(std::vector<int64_t>(targets.size(), -1));
  const DeviceArray<int64_t> valid_indices(std::vector<int64_t>(targets.size(), -1));
  const DeviceArray<int64_t> num_compacted(std::vector<int64_t>(1, -1));
  const DeviceArray<CompactedRows> result(std::vector<CompactedRows>(1));
  CompactRowsParams params;
  params.num_rows = static_cast<int64_t>(targets.size());
  params.targets = target_array.data();
  params.ignore_index = kIgnoreIndex;
  if (!first.empty()) params.gradients[0] = {first_array.data(), 1};
  if (!third.empty()) params.gradients[2] = {third_array.data(), third_stride};
  params.first_id = kFirstId;
  params.end_id = kEndId;
  params.row_indices = row_indices.data();
  params.valid_indices = valid_indices.data();
  params.num_compacted = num_compacted.data();
  params.result = result.data();
  EXPECT_EQ(LaunchCompactRows(params, nullptr), cudaSuccess);
  return {result.Read().front(), row_indices.Read(), valid_indices.Read(),
          num_compacted.Read().front()};
}

class CompactRowsTest : public testing::GpuTest {};

TEST_F(CompactRowsTest, ValidRowsKeepTheirOrderForAnyNumberOfRows) {
  // A thread processes four rows, and a step processes 4,096 rows.
  for (const size_t count : {1, 3, 4, 31, 127, 4'095, 4'096, 4'097, 20'001}) {
    std::vector<int64_t> targets;
    std::vector<int64_t> expected;
    uint64_t checksum = 0;
    for (size_t row = 0; row < count; ++row) {
      const bool is_ignored = row % 3 == 1 || (row > 4'000 && row < 4'200);
      targets.push_back(is_ignored ? kIgnoreIndex : kFirstId + static_cast<int64_t>(row % 50));
      if (!is_ignored) expected.push_back(static_cast<int64_t>(row));
      checksum += (row + 1) * static_cast<uint64_t>(targets.back());
    }

    const Outputs outputs = Compact(targets);

    ASSERT_EQ(outputs.result.num_compacted, static_cast<int64_t>(expected.size())) << count;
    EXPECT_EQ(outputs.num_compacted, outputs.result.num_compacted);
    for (size_t i = 0; i < count; ++i) {
      const bool is_there = i < expected.size();
      ASSERT_EQ(outputs.row_indices[i], is_there ? expected[i] : 0) << count;
      ASSERT_EQ(outputs.valid_indices[i], is_there ? static_cast<int64_t>(i) : 0) << count;
    }
    EXPECT_EQ(outputs.result.num_out_of_vocab, 0);
    EXPECT_EQ(outputs.result.num_valid, outputs.result.num_compacted);
    EXPECT_EQ(outputs.result.target_checksum, static_cast<int64_t>(checksum)) << count;
  }
}

TEST_F(CompactRowsTest, MinAndMaxTargetCoverCompactedRowsOnly) {
  std::vector<int64_t> targets(5'000, 60);
  targets[17] = 45;
  targets[4'321] = 88;
  targets[1] = targets[4'999] = kIgnoreIndex;
  EXPECT_EQ(Compact(targets).result.min_target, 45);
  EXPECT_EQ(Compact(targets).result.max_target, 88);

  std::vector<float> gradients(5'000, 1.0F);
  gradients[17] = gradients[4'321] = 0;
  const CompactedRows compacted = Compact(targets, gradients).result;
  EXPECT_EQ(compacted.min_target, 60);
  EXPECT_EQ(compacted.max_target, 60);
  EXPECT_EQ(compacted.num_compacted, 4'996);
  EXPECT_EQ(compacted.num_valid, 4'998);
}

TEST_F(CompactRowsTest, RowsWithoutAGradientAreNotCompacted) {
  const Outputs outputs = Compact({50, 50, 50, 50, kIgnoreIndex}, {0.0F, 1e-30F, 0.0F, NAN, 1.0F},
                                  {0.0F, 0.0F, -2.0F, 0.0F, 1.0F});

  ASSERT_EQ(outputs.result.num_compacted, 3);
  EXPECT_EQ(outputs.row_indices[0], 1);
  EXPECT_EQ(outputs.row_indices[1], 2);
  EXPECT_EQ(outputs.row_indices[2], 3) << "NaN is a gradient";
}

TEST_F(CompactRowsTest, ValidIndicesCountRowsWithoutAGradient) {
  // A step processes 4,096 rows. Every fifth row is ignored, and every third has a gradient.
  std::vector<int64_t> targets;
  std::vector<float> gradients;
  std::vector<int64_t> expected;
  int64_t num_valid = 0;
  for (int64_t row = 0; row < 9'000; ++row) {
    targets.push_back(row % 5 == 0 ? kIgnoreIndex : 50);
    gradients.push_back(row % 3 == 0 ? 1.0F : 0.0F);
    if (row % 5 == 0) continue;
    if (row % 3 == 0) expected.push_back(num_valid);
    ++num_valid;
  }

  const Outputs outputs = Compact(targets, gradients);

  EXPECT_EQ(outputs.result.num_valid, num_valid);
  ASSERT_EQ(outputs.num_compacted, static_cast<int64_t>(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(outputs.valid_indices[i], expected[i]);
}

TEST_F(CompactRowsTest, ABroadcastGradientAppliesToAllRows) {
  EXPECT_EQ(Compact({50, 51, 52}, {}, {1.0F}, 0).result.num_compacted, 3);
  EXPECT_EQ(Compact({50, 51, 52}, {}, {0.0F}, 0).result.num_compacted, 0);
}

TEST_F(CompactRowsTest, CountsOutOfVocabularyTargetsOfCompactedRows) {
  const int64_t far = int64_t{1} << 31;

  const Outputs outputs =
      Compact({kFirstId, kIgnoreIndex, kEndId - 1, kEndId, kFirstId - 1, far, -far});

  EXPECT_EQ(outputs.result.num_compacted, 6);
  EXPECT_EQ(outputs.result.num_out_of_vocab, 4);
  EXPECT_EQ(outputs.result.first_out_of_vocab, 3);
  EXPECT_EQ(Compact({50, kEndId}, {1.0F, 0.0F}).result.num_out_of_vocab, 0);
}

TEST_F(CompactRowsTest, NoRowsGiveNoCompactedRows) {
  const CompactedRows none = Compact({}).result;
  EXPECT_EQ(none.num_compacted, 0);
  EXPECT_GT(none.min_target, none.max_target);
}

TEST_F(CompactRowsTest, RefusesBrokenBounds) {
  const DeviceArray<CompactedRows> result(std::vector<CompactedRows>(1));
  CompactRowsParams params;
  EXPECT_EQ(LaunchCompactRows(params, nullptr), cudaErrorInvalidValue)
      << "no memory for the result";
  params.result = result.data();
  params.num_rows = 1;
  EXPECT_EQ(LaunchCompactRows(params, nullptr), cudaErrorInvalidValue) << "no targets";
  params.num_rows = -1;
  EXPECT_EQ(LaunchCompactRows(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace logprobd::kernels
