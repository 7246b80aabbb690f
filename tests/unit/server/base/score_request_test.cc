#include "server/base/score_request.h"

#include "gtest/gtest.h"
#include "tests/support/test_requests.h"

namespace logprobd::testing {
namespace {

TEST(ScoreRequestTest, UsesDefaultsForFieldsThatWereNotSent) {
  ScoreRequest request;
  EXPECT_EQ(request.outputs().bits(), kDefaultOutputs.bits());
  EXPECT_EQ(request.priority(), Priority::kNormal);
  EXPECT_EQ(request.num_segments(), 0);

  request.output_bits = 8;
  request.priority_number = 3;
  request.segment_offsets = {0, 2, 5};

  EXPECT_TRUE(request.outputs().Has(Output::kArgmax));
  EXPECT_FALSE(request.outputs().Has(Output::kLogprob));
  EXPECT_EQ(request.computed_outputs().bits(), 8U + 1U + 16U);  // segments sum logprob and greedy
  EXPECT_EQ(request.priority(), Priority::kLow);
  EXPECT_EQ(request.num_segments(), 2);
}

TEST(LateIfDueTest, ReportsACancellationWithinTheSlackOfTheDeadlineAsAPassedDeadline) {
  const absl::Time deadline = absl::FromUnixSeconds(10);
  const absl::Status cancelled = absl::CancelledError("left");
  const absl::Status unavailable = absl::UnavailableError("gone");

  EXPECT_EQ(LateIfDue(cancelled, deadline, deadline - kDeadlineSlack, "late"),
            absl::DeadlineExceededError("late"));
  EXPECT_EQ(LateIfDue(cancelled, deadline, deadline - absl::Milliseconds(21), "late"), cancelled);
  EXPECT_EQ(LateIfDue(cancelled, absl::InfiniteFuture(), deadline, "late"), cancelled);
  EXPECT_EQ(LateIfDue(unavailable, deadline, deadline, "late"), unavailable);
  EXPECT_TRUE(LateIfDue(absl::OkStatus(), deadline, deadline, "late").ok());
}

TEST(RequestSizeTest, CountsTheWholeMessageAndEachOfItsPieces) {
  ScoreRequest request = MakeRequest({.rows = 10, .piece_bytes = 1});
  EXPECT_EQ(PayloadBytes(request), 80 + 80 * 56);

  request.message_bytes = 1'000;

  EXPECT_EQ(PayloadBytes(request), 1'000 + 80 * 56);
}

TEST(RequestSizeTest, DoesNotCountRowsInMemoryOfTheClient) {
  ScoreRequest request = MakeRequest({.rows = 10});
  request.message_bytes = 1'000;
  for (const PayloadPlace place : {PayloadPlace::kSharedMemory, PayloadPlace::kDevice}) {
    request.hidden.place = place;

    EXPECT_EQ(PayloadBytes(request), 56);
  }
}

TEST(RequestSizeTest, CountsDecodedFields) {
  const ScoreRequest request =
      MakeRequest({.rows = 2, .candidate_counts = {3, 4}, .segment_offsets = {0, 1, 2}});

  EXPECT_EQ(FieldBytes(request), 4 * (2 + 7 + 3 + 3));  // targets, ids, two lists of offsets
}

TEST(RequestSizeTest, CountsTheAnswersArrays) {
  EXPECT_EQ(AnswerBytes(MakeRequest({.rows = 10})), 10 * 8);  // logprob and entropy
  EXPECT_EQ(AnswerBytes(MakeRequest({.rows = 10, .top_k = 5})), 10 * (8 + 5 * 8));
  EXPECT_EQ(AnswerBytes(MakeRequest({.rows = 2, .candidate_counts = {3, 4}})), 2 * 8 + 7 * 4);
  EXPECT_EQ(AnswerBytes(MakeRequest({.rows = 2, .segment_offsets = {0, 1, 2}})),
            2 * (8 + 1) + 2 * 13);  // greedy is needed to make segment_greedy
}

}  // namespace

}  // namespace logprobd::testing
