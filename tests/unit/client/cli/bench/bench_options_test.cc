#include "client/cli/bench/bench_options.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

BenchOptions OptionsOf(const std::vector<int64_t>& rows) {
  BenchOptions options;
  options.rows.clear();
  for (const int64_t size : rows) options.rows.push_back({.sizes = {{.rows = size}}});
  return options;
}

TEST(MakePlansTest, EachMixOfRowsHasEachConcurrency) {
  BenchOptions options = OptionsOf({1, 64});
  options.concurrency = {2, 8};

  std::vector<std::pair<int64_t, int64_t>> loads;
  for (const LoadPlan& plan : MakePlans(options)) {
    EXPECT_EQ(plan.request_rate, 0);
    loads.emplace_back(plan.mix.rows_max(), plan.concurrency);
  }

  EXPECT_THAT(loads, ElementsAre(Pair(1, 2), Pair(1, 8), Pair(64, 2), Pair(64, 8)));
}

TEST(MakePlansTest, RatesReplaceTheConcurrencyOfEachMixOfRows) {
  BenchOptions options = OptionsOf({1, 64});
  options.concurrency = {2, 8};
  options.request_rates = {0.5, 100};

  std::vector<std::pair<int64_t, double>> loads;
  for (const LoadPlan& plan : MakePlans(options)) {
    loads.emplace_back(plan.mix.rows_max(), plan.request_rate);
  }

  EXPECT_THAT(loads, ElementsAre(Pair(1, 0.5), Pair(1, 100), Pair(64, 0.5), Pair(64, 100)));
}

}  // namespace
}  // namespace logprobd::client
