#include "server/base/check.h"

#include "gtest/gtest.h"

namespace logprobd {
namespace {

TEST(CheckTest, PassesWithoutLookingAtTheValues) {
  int evaluated = 0;

  LOGPROBD_CHECK(evaluated == 0, ++evaluated);

  EXPECT_EQ(evaluated, 0);
}

TEST(CheckDeathTest, AbortsWithExpressionAndValues) {
  const int rows = 3;

  EXPECT_DEATH(LOGPROBD_CHECK(rows > 5, "rows=", rows),
               "check_test.cc:[0-9]+: broken invariant: rows > 5: rows=3");
  EXPECT_DEATH(LOGPROBD_CHECK(rows > 5), "broken invariant: rows > 5\n");
}

}  // namespace
}  // namespace logprobd
