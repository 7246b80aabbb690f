#include "kernels/cpu/cpu_isa.h"

#include <optional>
#include <string>

#include "gtest/gtest.h"

namespace logprobd::kernels {
namespace {

class CpuIsaTest : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(CpuIsaTest, IsFoundByItsName) {
  EXPECT_EQ(CpuIsaByName(CpuIsaName(GetParam())), GetParam());
}

/// A skip here means that the kernels of an instruction set are not tested on this machine.
TEST_P(CpuIsaTest, RunsHere) {
  if (!CpuIsaRuns(GetParam())) GTEST_SKIP() << "this CPU has no " << CpuIsaName(GetParam());
  EXPECT_GE(BestCpuIsa(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, CpuIsaTest, ::testing::ValuesIn(kAllCpuIsas),
                         [](const auto& info) { return std::string(CpuIsaName(info.param)); });

TEST(CpuIsaNameTest, AnUnknownNameGivesNothing) { EXPECT_EQ(CpuIsaByName("sse9"), std::nullopt); }

TEST(CpuIsaNameTest, TheBestRuns) { EXPECT_TRUE(CpuIsaRuns(BestCpuIsa())); }

}  // namespace
}  // namespace logprobd::kernels
