#include "server/app/heads/version_numbers.h"

#include <gtest/gtest.h>

#include <string>

#include "gmock/gmock.h"

namespace logprobd {
namespace {

using ::testing::HasSubstr;

void RecordLive(VersionNumbers& numbers, uint64_t number, const std::string& sha256) {
  WeightsVersion version;
  version.version = number;
  version.sha256 = sha256;
  numbers.RecordLive(version);
}

TEST(VersionNumbersTest, TheHighestNumberCountsStagedAndLiveVersions) {
  VersionNumbers numbers;
  EXPECT_EQ(numbers.highest(), 0U);
  RecordLive(numbers, 3, "a");
  numbers.RecordStaged(7);
  RecordLive(numbers, 5, "b");

  EXPECT_EQ(numbers.highest(), 7U);
  EXPECT_TRUE(numbers.CheckNames(7, "c").ok());  // it was never live
  EXPECT_TRUE(numbers.CheckRises(6, 5).ok());
}

TEST(VersionNumbersTest, ANumberThatWasLiveBelongsToItsDigest) {
  VersionNumbers numbers;
  RecordLive(numbers, 3, "a");

  EXPECT_TRUE(numbers.CheckNames(3, "a").ok());
  EXPECT_TRUE(numbers.CheckNames(2, "").ok());
  for (const char* sha256 : {"b", ""}) {
    const absl::Status status = numbers.CheckNames(3, sha256);
    EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(status.message(), HasSubstr("(sha256 a)"));
    EXPECT_THAT(status.message(), HasSubstr("the next free number is 4"));
  }
  EXPECT_EQ(numbers.DigestOf(3), "a");
  EXPECT_EQ(numbers.DigestOf(4), "");
}

TEST(VersionNumbersTest, ADigestThatIsNotKnownYetIsThatOfNoOtherWeights) {
  VersionNumbers numbers;
  RecordLive(numbers, 1, "");
  RecordLive(numbers, 2, "b");
  EXPECT_EQ(numbers.CheckNames(1, "a").code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(numbers.CheckNames(1, "").code(), absl::StatusCode::kAlreadyExists);

  numbers.SetUnknownDigest("a");

  EXPECT_TRUE(numbers.CheckNames(1, "a").ok());
  EXPECT_EQ(numbers.DigestOf(2), "b");
}

TEST(VersionNumbersTest, NumbersRiseAboveAllThatHaveBeenLive) {
  VersionNumbers numbers;
  RecordLive(numbers, 3, "a");
  RecordLive(numbers, 7, "b");
  numbers.RecordStaged(9);

  EXPECT_TRUE(numbers.CheckRises(8, 7).ok());
  EXPECT_TRUE(numbers.CheckRises(3, 7).ok());  // its weights may return
  EXPECT_EQ(
      numbers.CheckRises(5, 7),
      absl::AlreadyExistsError(
          "version: 5, must be above 7, which is live, because the numbers of a head rise; the "
          "next free number is 10. A rollback returns to the previous version"));
  RecordLive(numbers, 3, "a");
  EXPECT_THAT(numbers.CheckRises(5, 3).message(),
              HasSubstr("version: 5, must be above 7, which has been live"));
}

TEST(VersionNumbersTest, ForgottenNumbersAreNeverFree) {
  VersionNumbers numbers;
  constexpr uint64_t kLast = VersionNumbers::kDigestsMax + 10;
  for (uint64_t number = 10; number < kLast; ++number) {
    RecordLive(numbers, number, "a");
  }
  EXPECT_TRUE(numbers.CheckRises(10, kLast - 1).ok());

  RecordLive(numbers, kLast, "a");

  EXPECT_EQ(numbers.CheckRises(10, kLast).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(numbers.CheckRises(11, kLast).ok());
  EXPECT_TRUE(numbers.CheckNames(11, "a").ok());
}

}  // namespace
}  // namespace logprobd
