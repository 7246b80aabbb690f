#include "server/validation/validate_request.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace logprobd::testing {
namespace {

using ::testing::HasSubstr;

HeadInfo Head() {
  HeadInfo head;
  head.name = "main";
  head.hidden_size = 4;
  head.vocab_size = 100;
  head.vocab_rows = 128;
  head.weights_version = 3;
  head.limits = {.request_rows_max = 8,
                 .message_bytes_max = 600,
                 .top_k_max = 16,
                 .candidates_max = 6,
                 .segments_max = 3,
                 .stream_window = 2};
  return head;
}

/// Returns a valid request with three bf16 rows.
ScoreRequest Request() {
  ScoreRequest request;
  request.dtype_number = 1;
  request.rows = 3;
  request.hidden_size = 4;
  request.hidden.bytes = 3 * 4 * 2;
  request.targets = {0, 99, -100};
  return request;
}

struct Case {
  std::string name;
  std::function<void(ScoreRequest&)> change;
  std::string message;  ///< Empty when the request is valid.
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

void PrintTo(const Case& test, std::ostream* out) { *out << test.name; }

class ValidateRequestTest : public ::testing::TestWithParam<Case> {};

TEST_P(ValidateRequestTest, AcceptsOrNamesTheError) {
  ScoreRequest request = Request();
  GetParam().change(request);

  const absl::Status status = ValidateRequest(request, Head());

  if (GetParam().message.empty()) {
    EXPECT_TRUE(status.ok()) << status;
  } else {
    EXPECT_EQ(status.code(), GetParam().code);
    EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
  }
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

INSTANTIATE_TEST_SUITE_P(
    Cases, ValidateRequestTest,
    ::testing::Values(
        Case{"Plain", [](ScoreRequest&) {}, ""},
        Case{"EveryOption",
             [](ScoreRequest& r) {
               r.weights_version = 3;
               r.row_temperatures = {1e-4F, 1, 1e4F};
               r.entropy_temperature = 1;
               r.output_bits = 511;
               r.top_k = 16;
               r.candidate_ids = {0, 99, 5};
               r.candidate_offsets = {0, 0, 2, 3};
               r.segment_offsets = {0, 3, 3};
               r.priority_number = 3;
             },
             ""},
        Case{"NoRows",
             [](ScoreRequest& r) {
               r.rows = 0;
               r.hidden.bytes = 0;
               r.targets.clear();
             },
             ""},
        Case{"NoRowsButEmptyLists",
             [](ScoreRequest& r) {
               r.rows = 0;
               r.hidden.bytes = 0;
               r.targets.clear();
               r.candidate_offsets = {0};
               r.segment_offsets = {0};
             },
             ""},
        Case{"MostRows",
             [](ScoreRequest& r) {
               r.rows = 8;
               r.hidden.bytes = 64;
               r.targets.assign(8, 1);
             },
             ""},
        Case{"OneTemperature", [](ScoreRequest& r) { r.temperature = 0.5F; }, ""},
        Case{"MostCandidates",
             [](ScoreRequest& r) {
               r.candidate_ids = {1, 2, 3, 4, 5, 6};
               r.candidate_offsets = {0, 2, 4, 6};
             },
             ""},
        Case{"CandidateOffsetsWithoutCandidates",
             [](ScoreRequest& r) { r.candidate_offsets = {0, 0, 0, 0}; }, ""},
        Case{"MostSegments", [](ScoreRequest& r) { r.segment_offsets = {0, 1, 2, 3}; }, ""},
        Case{"IgnoreIndexAboveTheVocabulary",
             [](ScoreRequest& r) {
               r.ignore_index = 100;
               r.targets = {0, 100, 99};
             },
             ""},
        Case{"RowsInSharedMemory",
             [](ScoreRequest& r) {
               r.hidden.bytes = 0;
               r.shared_memory = SharedMemorySlice{.bytes = 24};
             },
             ""},
        Case{"RowsOnAGpu",
             [](ScoreRequest& r) {
               r.hidden.bytes = 0;
               r.cuda_ipc = CudaIpcSlice{.memory = {.bytes = 24}};
             },
             ""},
        Case{"SharedMemoryTooShort",
             [](ScoreRequest& r) { r.shared_memory = SharedMemorySlice{.bytes = 22}; },
             "shared_memory.bytes: 22 bytes, must be 24 (3 rows x 4 x 2 bytes of bf16)"},
        Case{"GpuMemoryTooLong",
             [](ScoreRequest& r) { r.cuda_ipc = CudaIpcSlice{.memory = {.bytes = 26}}; },
             "cuda_ipc.bytes: 26 bytes, must be 24 (3 rows x 4 x 2 bytes of bf16)"},
        Case{"TooManyRows", [](ScoreRequest& r) { r.rows = 9; }, "rows: 9, must be in [0, 8]"},
        Case{"ManyTimesTooManyRows", [](ScoreRequest& r) { r.rows = 4'294'967'295; },
             "rows: 4294967295"},
        Case{"VersionNotLive", [](ScoreRequest& r) { r.weights_version = 2; },
             "weights_version: 2, but version 3 is live",
             absl::StatusCode::kFailedPrecondition},
        Case{"NoDtype", [](ScoreRequest& r) { r.dtype_number = 0; }, "dtype: 0, must be"},
        Case{"UnknownDtype", [](ScoreRequest& r) { r.dtype_number = 77; }, "dtype: 77"},
        Case{"NegativeDtype", [](ScoreRequest& r) { r.dtype_number = -1; }, "dtype: -1"},
        Case{"FirstUnknownDtype", [](ScoreRequest& r) { r.dtype_number = 4; }, "dtype: 4, must be"},
        Case{"NegativePriority", [](ScoreRequest& r) { r.priority_number = -1; },
             "priority: -1, must be in [0, 3]"},
        Case{"NegativeRows", [](ScoreRequest& r) { r.rows = -1; }, "rows: -1, must be in [0, 8]"},
        Case{"UnknownPriority", [](ScoreRequest& r) { r.priority_number = 4; }, "priority: 4"},
        Case{"UnknownOutput", [](ScoreRequest& r) { r.output_bits = 512; }, "outputs: 512"},
        Case{"OtherHiddenSize", [](ScoreRequest& r) { r.hidden_size = 8; },
             "hidden_size: 8, must be 4 for head \"main\""},
        Case{"HiddenTooShort", [](ScoreRequest& r) { r.hidden.bytes = 23; },
             "hidden: 23 bytes, must be 24 (3 rows x 4 x 2 bytes of bf16)"},
        Case{"HiddenOfAnotherDtype", [](ScoreRequest& r) { r.dtype_number = 3; },
             "hidden: 24 bytes, must be 48"},
        Case{"TargetsMissing", [](ScoreRequest& r) { r.targets.clear(); },
             "targets: 0 ids, must be 3"},
        Case{"TooManyTargets", [](ScoreRequest& r) { r.targets.push_back(1); },
             "targets: 4 ids, must be 3"},
        Case{"TargetBeyondTheVocabulary", [](ScoreRequest& r) { r.targets[1] = 100; },
             "targets[1]: 100, must be in [0, 100) or the ignore_index -100"},
        Case{"TargetInThePadding", [](ScoreRequest& r) { r.targets[2] = 127; }, "targets[2]: 127"},
        Case{"NegativeTarget", [](ScoreRequest& r) { r.targets[0] = -1; }, "targets[0]: -1"},
        Case{"IgnoreIndexOfAnId", [](ScoreRequest& r) { r.ignore_index = 0; },
             "ignore_index: 0, must lie outside [0, 100)"},
        Case{"IgnoreIndexOfTheLastId", [](ScoreRequest& r) { r.ignore_index = 99; },
             "ignore_index: 99, must lie outside [0, 100)"},
        Case{"IgnoreIndexMoved", [](ScoreRequest& r) { r.ignore_index = -1; }, "targets[2]: -100"},
        Case{"ZeroTemperature", [](ScoreRequest& r) { r.temperature = 0.0F; }, "temperature: 0"},
        Case{"NanTemperature", [](ScoreRequest& r) { r.temperature = kNan; }, "temperature: nan"},
        Case{"NanEntropyTemperature", [](ScoreRequest& r) { r.entropy_temperature = kNan; },
             "entropy_temperature: nan"},
        Case{"RowTemperatureMissing", [](ScoreRequest& r) { r.row_temperatures = {1, 1}; },
             "row_temperatures: 2 values, must be 3"},
        Case{"BadRowTemperature", [](ScoreRequest& r) { r.row_temperatures = {1, kNan, 1}; },
             "row_temperatures[1]: nan"},
        Case{"BothTemperatures",
             [](ScoreRequest& r) {
               r.temperature = 1.0F;
               r.row_temperatures = {1, 1, 1};
             },
             "row_temperatures: 3 values together with temperature 1"},
        Case{"TopKAboveTheLimit", [](ScoreRequest& r) { r.top_k = 17; },
             "top_k: 17, must be in [0, 16]"},
        Case{"NegativeTopK", [](ScoreRequest& r) { r.top_k = -1; }, "top_k: -1, must be in [0, 16]"},
        Case{"TooManyCandidates", [](ScoreRequest& r) { r.candidate_ids.assign(7, 1); },
             "candidate_ids: 7 ids, must be at most 6"},
        Case{"CandidatesWithoutOffsets", [](ScoreRequest& r) { r.candidate_ids = {1}; },
             "candidate_offsets: 0 offsets, must be 4, rows + 1"},
        Case{"TooFewCandidateOffsets", [](ScoreRequest& r) { r.candidate_offsets = {0, 0, 0}; },
             "candidate_offsets: 3 offsets, must be 4, rows + 1"},
        Case{"CandidateOffsetsFall",
             [](ScoreRequest& r) {
               r.candidate_ids = {1, 2};
               r.candidate_offsets = {0, 2, 1, 2};
             },
             "candidate_offsets[2]: 1"},
        Case{"CandidateOffsetsEndEarly",
             [](ScoreRequest& r) {
               r.candidate_ids = {1, 2};
               r.candidate_offsets = {0, 0, 0, 1};
             },
             "candidate_offsets[3]: 1, must end at the number of candidate_ids, 2"},
        Case{"CandidateBeyondTheVocabulary",
             [](ScoreRequest& r) {
               r.candidate_ids = {1, 100};
               r.candidate_offsets = {0, 0, 0, 2};
             },
             "candidate_ids[1]: 100, must be in [0, 100)"},
        Case{"TooManySegments", [](ScoreRequest& r) { r.segment_offsets = {0, 1, 2, 3, 3}; },
             "segment_offsets: 4 segments, must be at most 3"},
        Case{"SegmentsEndEarly", [](ScoreRequest& r) { r.segment_offsets = {0, 2}; },
             "segment_offsets[1]: 2, must end at rows, 3"},
        Case{"SegmentsBeginLate", [](ScoreRequest& r) { r.segment_offsets = {1, 3}; },
             "segment_offsets[0]: 1, must be 0"},
        Case{"AnswerTooLarge",
             [](ScoreRequest& r) {
               r.rows = 8;
               r.hidden.bytes = 64;
               r.targets.assign(8, 1);
               r.top_k = 16;
             },
             "give a response of 1088 bytes, must be at most 600"}),
    [](const ::testing::TestParamInfo<Case>& test) { return test.param.name; });

TEST(ValidateRequestLimitsTest, TopKIsAlsoBoundedByTheVocabulary) {
  HeadInfo head = Head();
  head.vocab_size = 5;
  ScoreRequest request = Request();
  request.targets = {0, 1, 2};
  request.top_k = 6;
  EXPECT_THAT(std::string(ValidateRequest(request, head).message()),
              HasSubstr("top_k: 6, must be in [0, 5]"));
  request.top_k = 5;
  EXPECT_TRUE(ValidateRequest(request, head).ok()) << ValidateRequest(request, head);
}

// Each of the three rows takes 8 bytes for logprob and entropy, and 16 for two of the most likely
// ids; each of the two segments takes 13.
TEST(ValidateRequestLimitsTest, AnAnswerMayBeExactlyAsLargeAsAMessage) {
  constexpr int64_t kAnswerBytes = 3 * (8 + 16) + 2 * 13;
  ScoreRequest request = Request();
  request.top_k = 2;
  request.segment_offsets = {0, 1, 3};
  HeadInfo head = Head();

  head.limits.message_bytes_max = kAnswerBytes;
  EXPECT_TRUE(ValidateRequest(request, head).ok()) << ValidateRequest(request, head);
  head.limits.message_bytes_max = kAnswerBytes - 1;
  EXPECT_THAT(std::string(ValidateRequest(request, head).message()),
              HasSubstr("give a response of 98 bytes, must be at most 97"));
}

TEST(ValidateRequestLimitsTest, SizesThatOverflowAreRefused) {
  HeadInfo head = Head();
  head.hidden_size = 4'294'967'295;
  head.limits.request_rows_max = 4'294'967'295;
  ScoreRequest request = Request();
  request.rows = 4'294'967'295;
  request.hidden_size = 4'294'967'295;
  EXPECT_THAT(std::string(ValidateRequest(request, head).message()),
              HasSubstr("more than 2^63 bytes"));

  // The elements fit, and their bytes do not.
  head.hidden_size = request.hidden_size = int64_t{1} << 31;
  head.limits.request_rows_max = request.rows = int64_t{1} << 31;
  request.dtype_number = 3;
  EXPECT_THAT(std::string(ValidateRequest(request, head).message()),
              HasSubstr("more than 2^63 bytes"));
}

using internal::CheckIds;
using internal::CheckOffsets;
using internal::CheckTargets;
using internal::CheckTemperature;
using internal::CheckTemperatures;

TEST(ValidateListsTest, FindsTheFirstBadTargetOfALongList) {
  std::vector<int32_t> targets(65'536, 3);
  EXPECT_TRUE(CheckTargets(targets, 100, -100).ok());

  targets[65'535] = 100;
  targets[40'001] = -1;

  EXPECT_EQ(CheckTargets(targets, 100, -100).message(),
            "targets[40001]: -1, must be in [0, 100) or the ignore_index -100");
}

TEST(ValidateListsTest, AcceptsAnIgnoreIndexAboveTheVocabulary) {
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
  EXPECT_EQ(CheckIds("candidate_ids", {5, 99, 100, 5}, 100).message(),
            "candidate_ids[2]: 100, must be in [0, 100)");
}

TEST(ValidateListsTest, NamesTheFirstBadOffset) {
  EXPECT_TRUE(CheckOffsets("o", {0, 0, 2, 5}, 5, "rows").ok());
  EXPECT_TRUE(CheckOffsets("o", {0}, 0, "rows").ok());
  EXPECT_EQ(CheckOffsets("o", {1, 5}, 5, "rows").message(), "o[0]: 1, must be 0");
  EXPECT_EQ(CheckOffsets("o", {}, 0, "rows").message(), "o[0]: missing, must be 0");
  EXPECT_EQ(CheckOffsets("o", {0, 3, 2, 5}, 5, "rows").message(),
            "o[2]: 2, must not be below the previous offset, 3");
  EXPECT_EQ(CheckOffsets("o", {0, 0, 1, 3, 2, 5}, 5, "rows").message(),
            "o[4]: 2, must not be below the previous offset, 3");
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
  EXPECT_EQ(CheckTemperatures("row_temperatures", {1.0F, 0.0F, -1.0F}, {5, 5, 5}, -100).message(),
            "row_temperatures[1]: 0, must be finite and in [1e-4, 1e4]");
}

// The server refused a temperature of 0 in rows that it does not score, unlike the Python client.
TEST(ValidateListsTest, AcceptsAnyTemperatureInIgnoredRows) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values = {0.0F, 1.0F, nan, -1.0F};
  EXPECT_TRUE(CheckTemperatures("row_temperatures", values, {-100, 5, -100, -100}, -100).ok());
  EXPECT_TRUE(CheckTemperatures("row_temperatures", values, {100, 5, 100, 100}, 100).ok());

  EXPECT_EQ(CheckTemperatures("row_temperatures", values, {-100, 5, -100, 7}, -100).message(),
            "row_temperatures[3]: -1, must be finite and in [1e-4, 1e4]");
}

}  // namespace

}  // namespace logprobd::testing
