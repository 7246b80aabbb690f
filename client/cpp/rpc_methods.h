#pragma once

namespace logprobd::client {

/// Full names of the methods this library calls; that of health is in health.h.
inline constexpr char kScoreMethod[] = "/logprobd.v1.Scoring/Score";
inline constexpr char kScoreStreamMethod[] = "/logprobd.v1.Scoring/ScoreStream";
inline constexpr char kListHeadsMethod[] = "/logprobd.v1.Scoring/ListHeads";
inline constexpr char kVerifyMethod[] = "/logprobd.v1.Scoring/Verify";
/// The name under which health is asked.
inline constexpr char kScoringService[] = "logprobd.v1.Scoring";

}  // namespace logprobd::client
