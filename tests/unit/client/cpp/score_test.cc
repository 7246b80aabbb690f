#include "client/cpp/score.h"

#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/client/cpp/score_case.h"

namespace logprobd::client {
namespace {

using ::testing::HasSubstr;

struct BadArgs {
  std::string name;
  std::function<void(ScoreCase&)> spoil;
  std::string message;
};

class CheckArgsTest : public ::testing::TestWithParam<BadArgs> {};

TEST_P(CheckArgsTest, NamesTheFieldAndWhatItMustBe) {
  ScoreCase c(4);
  GetParam().spoil(c);

  const absl::Status status = CheckScoreArgs(c.args);

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
}

const std::vector<int64_t> kFalling = {0, 3, 2, 4};
const std::vector<int64_t> kShort = {0, 3};
const std::vector<int64_t> kLate = {1, 4};
const std::vector<int32_t> kIds = {1, 2};

INSTANTIATE_TEST_SUITE_P(
    Fields, CheckArgsTest,
    ::testing::Values(
        BadArgs{"NegativeRows", [](ScoreCase& c) { c.args.rows = -1; }, "rows is -1"},
        BadArgs{"RowsThatOverflow", [](ScoreCase& c) { c.args.rows = int64_t{1} << 60; },
                "rows is"},
        BadArgs{"HiddenSizeBelowZero", [](ScoreCase& c) { c.args.hidden_size = -8; },
                "hidden_size is -8"},
        BadArgs{"UnknownDtype", [](ScoreCase& c) { c.args.dtype = static_cast<Dtype>(9); },
                "dtype is 9"},
        BadArgs{"HiddenTooShort", [](ScoreCase& c) { c.args.hidden.remove_suffix(1); },
                "hidden has 63 bytes, must have rows x hidden_size x 2 (bf16) = 4 x 8 x 2 = 64"},
        BadArgs{"DeviceRowsTooShort",
                [](ScoreCase& c) { c.args.device_rows = DeviceRows{.bytes = 63}; },
                "device_rows has 63 bytes, must have rows x hidden_size x size of dtype = 64"},
        BadArgs{"DeviceRowsBeforeTheirAllocation",
                [](ScoreCase& c) { c.args.device_rows = DeviceRows{.offset = -16, .bytes = 64}; },
                "device_rows has offset -16, must be >= 0"},
        BadArgs{"HiddenTooShortWithDeviceRows",
                [](ScoreCase& c) {
                  c.args.device_rows = DeviceRows{.bytes = 64};
                  c.args.hidden.remove_suffix(1);
                },
                "hidden has 63 bytes"},
        BadArgs{"TargetsTooFew", [](ScoreCase& c) { c.args.targets.remove_suffix(1); },
                "targets has 3 ids, must have one per row: rows = 4"},
        BadArgs{"NegativeTopK", [](ScoreCase& c) { c.args.top_k = -1; }, "top_k is -1"},
        BadArgs{"CandidatesWithoutOffsets", [](ScoreCase& c) { c.args.candidate_ids = kIds; },
                "candidate_ids requires candidate_offsets"},
        BadArgs{"CandidateOffsetsTooFew", [](ScoreCase& c) { c.args.candidate_offsets = kShort; },
                "must have rows + 1 = 5"},
        BadArgs{"SegmentsThatFall", [](ScoreCase& c) { c.args.segment_offsets = kFalling; },
                "segment_offsets[2] is 2, less than the one before it (3)"},
        BadArgs{"SegmentsThatEndEarly", [](ScoreCase& c) { c.args.segment_offsets = kShort; },
                "ends at 3, must end at rows = 4"},
        BadArgs{"TraceparentTooLong",
                [](ScoreCase& c) { c.args.traceparent = std::string(257, 'a'); },
                "traceparent has 257 bytes, must be at most 256 printable ASCII characters"},
        BadArgs{"TraceparentWithNewline", [](ScoreCase& c) { c.args.traceparent = "a\n"; },
                "traceparent has 2 bytes"},
        BadArgs{"TraceparentBeyondAscii", [](ScoreCase& c) { c.args.traceparent = "\xC3\xA9"; },
                "traceparent has 2 bytes"},
        BadArgs{"SegmentsThatStartLate", [](ScoreCase& c) { c.args.segment_offsets = kLate; },
                "segment_offsets[0] is 1, must be 0"}),
    [](const auto& tested) { return tested.param.name; });

TEST(CheckArgsOkTest, AcceptsTheLongestTraceparent) {
  ScoreCase c(1);
  c.args.traceparent = std::string(254, 'a') + " ~";

  EXPECT_TRUE(CheckScoreArgs(c.args).ok());
}

TEST(CheckArgsOkTest, AcceptsNoRows) {
  const ScoreCase c(0);

  EXPECT_TRUE(CheckScoreArgs(c.args).ok());
}

}  // namespace
}  // namespace logprobd::client
