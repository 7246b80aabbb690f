#include "server/engine/rank_team.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/engine/collective.h"
#include "tests/support/run_ranks.h"

namespace logprobd {
namespace {

std::unique_ptr<Collective> MakeCollective(int32_t num_ranks) {
  return std::make_unique<InProcessCollective>(num_ranks);
}

TEST(RankTeamTest, AgreeReturnsTheFailureOfTheLowestRank) {
  RankTeam team(4, MakeCollective(4));
  std::vector<absl::Status> answers(4);

  testing::RunRanks(4, [&](int32_t rank) {
    absl::Status own = rank == 1   ? absl::ResourceExhaustedError("no memory")
                       : rank == 3 ? absl::InternalError("broken")
                                   : absl::OkStatus();
    answers[static_cast<size_t>(rank)] = team.Agree(rank, std::move(own));
  });

  for (const absl::Status& answer : answers) {
    EXPECT_EQ(answer, absl::ResourceExhaustedError("no memory"));
  }
}

TEST(RankTeamTest, AgreesAThousandTimesInARow) {
  RankTeam team(3, MakeCollective(3));
  std::vector<int> wrong(3);

  testing::RunRanks(3, [&](int32_t rank) {
    for (int round = 0; round < 1'000; ++round) {
      const bool fails = round % 7 == 0;
      const absl::Status own =
          fails && rank == round % 3 ? absl::UnknownError(std::to_string(round)) : absl::OkStatus();
      const absl::Status expected =
          fails ? absl::UnknownError(std::to_string(round)) : absl::OkStatus();
      wrong[static_cast<size_t>(rank)] += team.Agree(rank, own) == expected ? 0 : 1;
    }
  });

  EXPECT_EQ(wrong, (std::vector<int>{0, 0, 0}));
}

TEST(RankTeamTest, AbortReleasesWaitingRanksWithTheFirstReason) {
  RankTeam team(3, MakeCollective(3));
  std::vector<absl::Status> answers(3);

  testing::RunRanks(3, [&](int32_t rank) {
    if (rank == 2) {
      team.Abort(absl::UnavailableError("hung"));
      team.Abort(absl::InternalError("a later reason"));
    }
    answers[static_cast<size_t>(rank)] =
        rank == 2 ? team.aborted() : team.Agree(rank, absl::OkStatus());
  });

  for (const absl::Status& answer : answers) EXPECT_EQ(answer, absl::UnavailableError("hung"));
  EXPECT_EQ(team.Agree(0, absl::OkStatus()), absl::UnavailableError("hung"));
}

TEST(RankTeamTest, TeamOfOneReturnsItsOwnStatus) {
  RankTeam team(1, nullptr);

  EXPECT_TRUE(team.Agree(0, absl::OkStatus()).ok());
  EXPECT_EQ(team.Agree(0, absl::InternalError("x")), absl::InternalError("x"));
}

}  // namespace
}  // namespace logprobd
