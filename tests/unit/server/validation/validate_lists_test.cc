#include "server/validation/validate_lists.h"

#include <cstdint>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::internal {
namespace {

TEST(ValidateListsTest, FindsTheFirstBadTargetOfALongList) {
  std::vector<int32_t> targets(65'536, 3);
  EXPECT_TRUE(CheckTargets(targets, 100, -100).ok());

  targets[65'535] = 100;
  targets[40'001] = -1;

  EXPECT_EQ(CheckTargets(targets, 100, -100).message(),
            "targets[40001]: -1, must be in [0, 100) or the ignore_index -100");
}

TEST(ValidateListsTest, TakesAnIgnoreIndexAboveTheVocabulary) {
  EXPECT_TRUE(CheckTargets({99, 100, 0}, 100, 100).ok());
  EXPECT_FALSE(CheckTargets({99, 101, 0}, 100, 100).ok());
  const int32_t smallest = std::numeric_limits<int32_t>::min();
  EXPECT_TRUE(CheckTargets({smallest}, 100, smallest).ok());
}

TEST(ValidateListsTest, NamesTheFirstBadId) {
  EXPECT_TRUE(CheckIds("candidate_ids", {}, 100).ok());
  EXPECT_TRUE(CheckIds("candidate_ids", {0, 99}, 100).ok());
  EXPECT_EQ(CheckIds("candidate_ids", {5, -100, 100}, 100).message(),
            "candidate_ids[1]: -100, must be in [0, 100)");
}

TEST(ValidateListsTest, NamesTheFirstBadOffset) {
  EXPECT_TRUE(CheckOffsets("o", {0, 0, 2, 5}, 5, "rows").ok());
  EXPECT_TRUE(CheckOffsets("o", {0}, 0, "rows").ok());
  EXPECT_EQ(CheckOffsets("o", {1, 5}, 5, "rows").message(), "o[0]: 1, must be 0");
  EXPECT_EQ(CheckOffsets("o", {}, 0, "rows").message(), "o[0]: missing, must be 0");
  EXPECT_EQ(CheckOffsets("o", {0, 3, 2, 5}, 5, "rows").message(),
            "o[2]: 2, must not be below the offset before it, 3");
  EXPECT_EQ(CheckOffsets("o", {0, 4}, 5, "rows").message(), "o[1]: 4, must end at rows, 5");
  EXPECT_FALSE(CheckOffsets("o", {0, 4'294'967'295U}, -1, "rows").ok());
}

TEST(ValidateListsTest, BoundsTemperatures) {
  for (const float good : {1e-4F, 1.0F, 1e4F}) {
    EXPECT_TRUE(CheckTemperature("temperature", good).ok()) << good;
  }
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {0.0F, -1.0F, 1e-30F, 1.1e4F, infinity, -infinity,
                          std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_FALSE(CheckTemperature("temperature", bad).ok()) << bad;
  }
  EXPECT_EQ(CheckTemperatures("row_temperatures", {1.0F, 0.0F, -1.0F}).message(),
            "row_temperatures[1]: 0, must be finite and in [1e-4, 1e4]");
}

}  // namespace
}  // namespace logprobd::internal
