#include "client/cli/bench/machine_info.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::client {
namespace {

using ::testing::MatchesRegex;

TEST(MachineInfoTest, FindsTheCpuModel) {
  EXPECT_EQ(
      CpuModelOf("processor\t: 0\nmodel\t\t: 143\nmodel name\t: Some CPU @ 2 GHz\nflags\t: x\n"),
      "Some CPU @ 2 GHz");
  EXPECT_EQ(CpuModelOf("processor : 0\n"), "unknown");
}

TEST(MachineInfoTest, TellsCoresAndDate) {
  const MachineInfo facts = ReadMachineInfo();

  EXPECT_GE(facts.cores, 1);
  EXPECT_THAT(facts.date, MatchesRegex("[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+Z"));
}

TEST(CommandLineTextTest, QuotesWhatAShellWouldTakeApart) {
  EXPECT_EQ(CommandLineText({"bench", "--rows", "1:80,2:20", "--head", "a b", "", "it's"}),
            "logprobctl bench --rows 1:80,2:20 --head 'a b' '' 'it'\\''s'");
}

}  // namespace
}  // namespace logprobd::client
