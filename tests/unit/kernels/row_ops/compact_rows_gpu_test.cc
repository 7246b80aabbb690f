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

struct Found {
  CompactedRows selected;
  std::vector<int64_t> index;
  std::vector<int64_t> valid_indices;
  int64_t num_compacted;  // as kernels find it
};

/// `gradients`, where not empty, are those of the first and the third of the four.
Found Select(const std::vector<int64_t>& targets, const std::vector<float>& first = {},
             const std::vector<float>& third = {}, int64_t third_stride = 1) {
  const DeviceArray<int64_t> target_array(targets);
  const DeviceArray<float> first_array(first);
  const DeviceArray<float> third_array(third);
  const DeviceArray<int64_t> index(std::vector<int64_t>(targets.size(), -1));
  const DeviceArray<int64_t> valid_indices(std::vector<int64_t>(targets.size(), -1));
  const DeviceArray<int64_t> num_compacted(std::vector<int64_t>(1, -1));
  const DeviceArray<CompactedRows> selected(std::vector<CompactedRows>(1));
  CompactRowsParams params;
  params.num_rows = static_cast<int64_t>(targets.size());
  params.targets = target_array.data();
  params.ignore_index = kIgnoreIndex;
  if (!first.empty()) params.gradients[0] = {first_array.data(), 1};
  if (!third.empty()) params.gradients[2] = {third_array.data(), third_stride};
  params.first_id = kFirstId;
  params.end_id = kEndId;
  params.row_indices = index.data();
  params.valid_indices = valid_indices.data();
  params.num_compacted = num_compacted.data();
  params.result = selected.data();
  EXPECT_EQ(LaunchCompactRows(params, nullptr), cudaSuccess);
  return {selected.Read().front(), index.Read(), valid_indices.Read(),
          num_compacted.Read().front()};
}

class CompactRowsTest : public testing::GpuTest {};

TEST_F(CompactRowsTest, RowsThatAreNotIgnoredComeInTheirOrderAtAnyCount) {
  // A thread takes four rows, a step 4,096.
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

    const Found found = Select(targets);

    ASSERT_EQ(found.selected.num_compacted, static_cast<int64_t>(expected.size())) << count;
    EXPECT_EQ(found.num_compacted, found.selected.num_compacted);
    for (size_t i = 0; i < count; ++i) {
      const bool is_there = i < expected.size();
      ASSERT_EQ(found.index[i], is_there ? expected[i] : 0) << count;
      ASSERT_EQ(found.valid_indices[i], is_there ? static_cast<int64_t>(i) : 0) << count;
    }
    EXPECT_EQ(found.selected.num_out_of_vocab, 0);
    EXPECT_EQ(found.selected.num_valid, found.selected.num_compacted);
    EXPECT_EQ(found.selected.target_checksum, static_cast<int64_t>(checksum)) << count;
  }
}

TEST_F(CompactRowsTest, TheLeastAndTheGreatestTargetAreThoseOfSelectedRows) {
  std::vector<int64_t> targets(5'000, 60);
  targets[17] = 45;
  targets[4'321] = 88;
  targets[1] = targets[4'999] = kIgnoreIndex;
  EXPECT_EQ(Select(targets).selected.min_target, 45);
  EXPECT_EQ(Select(targets).selected.max_target, 88);

  std::vector<float> gradients(5'000, 1.0F);
  gradients[17] = gradients[4'321] = 0;
  const CompactedRows reached = Select(targets, gradients).selected;
  EXPECT_EQ(reached.min_target, 60);
  EXPECT_EQ(reached.max_target, 60);
  EXPECT_EQ(reached.num_compacted, 4'996);
  EXPECT_EQ(reached.num_valid, 4'998);
}

TEST_F(CompactRowsTest, ARowThatNoGradientReachesIsLeftOut) {
  const Found found = Select({50, 50, 50, 50, kIgnoreIndex}, {0.0F, 1e-30F, 0.0F, NAN, 1.0F},
                             {0.0F, 0.0F, -2.0F, 0.0F, 1.0F});

  ASSERT_EQ(found.selected.num_compacted, 3);
  EXPECT_EQ(found.index[0], 1);
  EXPECT_EQ(found.index[1], 2);
  EXPECT_EQ(found.index[2], 3) << "NaN is a gradient";
}

TEST_F(CompactRowsTest, CountedPlacesCountRowsThatNoGradientReaches) {
  // More than a step of 4,096; every fifth row is ignored, every third reached.
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

  const Found found = Select(targets, gradients);

  EXPECT_EQ(found.selected.num_valid, num_valid);
  ASSERT_EQ(found.num_compacted, static_cast<int64_t>(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(found.valid_indices[i], expected[i]);
}

TEST_F(CompactRowsTest, AnExpandedGradientIsOneNumber) {
  EXPECT_EQ(Select({50, 51, 52}, {}, {1.0F}, 0).selected.num_compacted, 3);
  EXPECT_EQ(Select({50, 51, 52}, {}, {0.0F}, 0).selected.num_compacted, 0);
}

TEST_F(CompactRowsTest, TargetsOutsideOfTheIdsAreCountedWhereTheyAreSelected) {
  const int64_t far = int64_t{1} << 31;

  const Found found = Select({kFirstId, kIgnoreIndex, kEndId - 1, kEndId, kFirstId - 1, far, -far});

  EXPECT_EQ(found.selected.num_compacted, 6);
  EXPECT_EQ(found.selected.num_out_of_vocab, 4);
  EXPECT_EQ(found.selected.first_out_of_vocab, 3);
  EXPECT_EQ(Select({50, kEndId}, {1.0F, 0.0F}).selected.num_out_of_vocab, 0);
}

TEST_F(CompactRowsTest, OfNoRowsNoneIsSelected) {
  const CompactedRows none = Select({}).selected;
  EXPECT_EQ(none.num_compacted, 0);
  EXPECT_GT(none.min_target, none.max_target);
}

TEST_F(CompactRowsTest, RefusesBrokenBounds) {
  const DeviceArray<CompactedRows> selected(std::vector<CompactedRows>(1));
  CompactRowsParams params;
  EXPECT_EQ(LaunchCompactRows(params, nullptr), cudaErrorInvalidValue) << "no place for the result";
  params.result = selected.data();
  params.num_rows = 1;
  EXPECT_EQ(LaunchCompactRows(params, nullptr), cudaErrorInvalidValue) << "no targets";
  params.num_rows = -1;
  EXPECT_EQ(LaunchCompactRows(params, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace logprobd::kernels
