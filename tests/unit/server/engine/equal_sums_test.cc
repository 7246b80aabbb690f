#include "server/engine/equal_sums.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "tests/support/temp_folder.h"

namespace logprobd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Two ways that must equal the first, of which one computes only target logits.
std::vector<SumResults> EqualResults() {
  return {{.way = "fused",
           .consequence = "",
           .reference = 0,
           .target_logits = {1, 2},
           .max_keys = {3, 4},
           .sums = {5, 6, 7, 8}},
          {.way = "listed", .consequence = "ranks", .reference = 0, .target_logits = {1, 2}},
          {.way = "chunked",
           .consequence = "paths",
           .reference = 0,
           .target_logits = {1, 2},
           .max_keys = {3, 4},
           .sums = {5, 6, 7, 8}},
          {.way = "small chunks", .consequence = "batches", .reference = 2, .sums = {5, 6, 7, 8}}};
}

TEST(DescribeUnequalSumsTest, SaysNothingOfEqualSums) {
  EXPECT_EQ(DescribeUnequalSums(EqualResults()), "");
  EXPECT_EQ(DescribeUnequalSums({}), "");
}

TEST(DescribeUnequalSumsTest, NoticesOneBitOfEachArray) {
  std::vector<SumResults> logits = EqualResults();
  logits[1].target_logits[1] ^= 1;
  std::vector<SumResults> keys = EqualResults();
  keys[2].max_keys[0] ^= uint64_t{1} << 63;
  std::vector<SumResults> sums = EqualResults();
  sums[3].sums[3] ^= 1;

  EXPECT_EQ(DescribeUnequalSums(logits), "listed differs from fused: ranks");
  EXPECT_EQ(DescribeUnequalSums(keys), "chunked differs from fused: paths");
  EXPECT_EQ(DescribeUnequalSums(sums), "small chunks differs from chunked: batches");
}

TEST(DescribeUnequalSumsTest, ComparesEachWayWithItsOwnReference) {
  std::vector<SumResults> results = EqualResults();
  results[2].sums[0] ^= 1;
  results[3].sums[0] ^= 1;

  EXPECT_EQ(DescribeUnequalSums(results), "chunked differs from fused: paths");
}

/// A folder for the state and a check whose result tests choose.
class CheckUnlessKnownTest : public ::testing::Test {
 protected:
  std::string file() const { return folder_.path("equal_sums"); }
  std::string Content() const { return folder_.Read("equal_sums"); }
  void Write(const std::string& content) const { folder_.Write("equal_sums", content); }

  /// Runs a check with the result `difference`, and returns the result of CheckUnlessKnown.
  std::string Check(const std::string& state_dir, const std::string& environment,
                    const std::string& difference = "") {
    const absl::StatusOr<std::string> result =
        CheckUnlessKnown(state_dir, environment, [&]() -> absl::StatusOr<std::string> {
          ++num_checks_;
          return difference;
        });
    EXPECT_TRUE(result.ok()) << result.status();
    return result.value_or("failed");
  }

  const testing::TempFolder folder_;
  int num_checks_ = 0;
};

constexpr const char* kH200 = "NVIDIA H200, driver 580.159.04";
constexpr const char* kNewDriver = "NVIDIA H200, driver 590.1";

TEST_F(CheckUnlessKnownTest, ChecksAtEachStartWithoutAFolder) {
  EXPECT_EQ(Check("", kH200), "");
  EXPECT_EQ(Check("", kH200), "");

  EXPECT_EQ(num_checks_, 2);
}

TEST_F(CheckUnlessKnownTest, ChecksAnEnvironmentOnce) {
  EXPECT_EQ(Check(folder_.path(), kH200), "");
  EXPECT_EQ(Check(folder_.path(), kH200), "");

  EXPECT_EQ(num_checks_, 1);
  EXPECT_EQ(Content(),
            "logprobd found equal sums in these environments (format 1)\n"
            "NVIDIA H200, driver 580.159.04\n");
}

TEST_F(CheckUnlessKnownTest, ChecksAgainWithAnotherDriverAndRemembersBoth) {
  (void)Check(folder_.path(), kH200);
  (void)Check(folder_.path(), kNewDriver);
  EXPECT_EQ(num_checks_, 2);

  (void)Check(folder_.path(), kH200);
  (void)Check(folder_.path(), kNewDriver);

  EXPECT_EQ(num_checks_, 2);
}

TEST_F(CheckUnlessKnownTest, ComparesWholeLines) {
  (void)Check(folder_.path(), "driver 580.159");

  (void)Check(folder_.path(), "driver 580.15");

  EXPECT_EQ(num_checks_, 2);
}

TEST_F(CheckUnlessKnownTest, RepeatsAFailedCheckAtEachStart) {
  EXPECT_EQ(Check(folder_.path(), kH200, "mma.sync differs"), "mma.sync differs");
  EXPECT_EQ(Check(folder_.path(), kH200, "mma.sync differs"), "mma.sync differs");
  EXPECT_FALSE(std::filesystem::exists(file()));

  EXPECT_EQ(Check(folder_.path(), kH200), "");

  EXPECT_EQ(num_checks_, 3);
}

TEST_F(CheckUnlessKnownTest, ReturnsTheErrorOfTheCheckAndRemembersNothing) {
  const auto result = CheckUnlessKnown(folder_.path(), kH200, []() -> absl::StatusOr<std::string> {
    return absl::InternalError("the GPU is lost");
  });

  EXPECT_EQ(result.status(), absl::InternalError("the GPU is lost"));
  EXPECT_FALSE(std::filesystem::exists(file()));
}

TEST_F(CheckUnlessKnownTest, IgnoresAMalformedFileWithALogLineAndReplacesIt) {
  const std::string title = "logprobd found equal sums in these environments (format 1)\n";
  const std::string h200 = std::string(kH200) + "\n";
  for (const std::string& content :
       {std::string(), std::string("{}"), h200, title + kH200, absl::StrCat(title, "\n", h200),
        absl::StrCat(title, "\xFF\n", h200), absl::StrCat(title, "a\tb\n", h200),
        absl::StrCat(title, std::string(70'000, 'x'), "\n", h200)}) {
    SCOPED_TRACE(content.substr(0, 100));
    Write(content);
    num_checks_ = 0;

    ::testing::internal::CaptureStderr();
    EXPECT_EQ(Check(folder_.path(), kH200), "");
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(Check(folder_.path(), kH200), "");

    EXPECT_EQ(num_checks_, 1);
    EXPECT_THAT(log, AllOf(HasSubstr("is ignored"), HasSubstr(file())));
    EXPECT_EQ(Content(), title + h200);
  }
}

TEST_F(CheckUnlessKnownTest, AFolderThatCannotBeWrittenCostsALogLineAndTheCheck) {
  for (const std::string& state_dir : {folder_.path("absent"), std::string("/proc/self/fd")}) {
    num_checks_ = 0;

    ::testing::internal::CaptureStderr();
    EXPECT_EQ(Check(state_dir, kH200), "");
    EXPECT_EQ(Check(state_dir, kH200), "");

    EXPECT_EQ(num_checks_, 2);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                AllOf(HasSubstr("cannot be remembered"), HasSubstr(state_dir)));
  }
}

TEST_F(CheckUnlessKnownTest, DoesNotWaitOnAFileThatIsAFifo) {
  ASSERT_EQ(mkfifo(file().c_str(), 0600), 0);

  EXPECT_EQ(Check(folder_.path(), kH200), "");

  EXPECT_EQ(num_checks_, 1);
}

TEST_F(CheckUnlessKnownTest, LeavesNoOtherFilesInTheFolder) {
  (void)Check(folder_.path(), kH200);
  (void)Check(folder_.path(), kNewDriver);

  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
    names.push_back(entry.path().filename());
  }
  EXPECT_THAT(names, ::testing::ElementsAre("equal_sums"));
}

}  // namespace
}  // namespace logprobd
