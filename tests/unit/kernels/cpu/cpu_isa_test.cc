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

TEST(CpuIsaRunsTest, FindsWhatTheCompilersRuntimeFinds) {
  EXPECT_TRUE(CpuIsaRuns(CpuIsa::kGeneric));
#if defined(__x86_64__)
  // The builtin takes a literal only. It also asks whether the operating system saves the
  // registers.
  const bool has_avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
                        __builtin_cpu_supports("f16c") != 0;
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") != 0 &&
                          __builtin_cpu_supports("avx512bw") != 0 &&
                          __builtin_cpu_supports("avx512dq") != 0 &&
                          __builtin_cpu_supports("avx512vl") != 0;
  const bool has_avx512_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16") != 0;
  const bool has_amx = has_avx512_bf16 && __builtin_cpu_supports("amx-bf16") != 0 &&
                       __builtin_cpu_supports("amx-tile") != 0;
  EXPECT_EQ(CpuIsaRuns(CpuIsa::kAvx2), has_avx2);
  EXPECT_EQ(CpuIsaRuns(CpuIsa::kAvx512), has_avx512);
  EXPECT_EQ(CpuIsaRuns(CpuIsa::kAvx512Bf16), has_avx512_bf16);
  // The operating system may refuse the tile registers.
  EXPECT_LE(CpuIsaRuns(CpuIsa::kAmxBf16), has_amx);
#endif
}

TEST(CpuIsaNameTest, AnUnknownNameGivesNothing) { EXPECT_EQ(CpuIsaByName("sse9"), std::nullopt); }

TEST(CpuIsaNameTest, TheBestRuns) { EXPECT_TRUE(CpuIsaRuns(BestCpuIsa())); }

}  // namespace
}  // namespace logprobd::kernels
