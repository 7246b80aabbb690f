#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// Full names of the methods that this library calls.
inline constexpr char kScoreMethod[] = "/logprobd.v1.Scoring/Score";
inline constexpr char kScoreStreamMethod[] = "/logprobd.v1.Scoring/ScoreStream";
inline constexpr char kListHeadsMethod[] = "/logprobd.v1.Scoring/ListHeads";
inline constexpr char kVerifyMethod[] = "/logprobd.v1.Scoring/Verify";
inline constexpr char kHealthMethod[] = "/grpc.health.v1.Health/Check";
/// The service name in health requests.
inline constexpr char kScoringService[] = "logprobd.v1.Scoring";

/// Convert small messages between the wire format and this library's types. A message that cannot
/// be parsed is INTERNAL.
grpc::ByteBuffer EncodeListHeads();
absl::StatusOr<ServerInfo> ParseListHeads(const grpc::ByteBuffer& body);
grpc::ByteBuffer EncodeVerify(const VerifyArgs& args);
absl::StatusOr<VerifyReport> ParseVerify(const grpc::ByteBuffer& body);

/// Encodes a grpc.health.v1.HealthCheckRequest. It is encoded by hand, because a generated package
/// could clash with a copy of it in another library of the process.
grpc::ByteBuffer EncodeHealthRequest(absl::string_view service);

/// Encodes a grpc.health.v1.HealthCheckResponse that says SERVING.
grpc::ByteBuffer EncodeServing();

/// Returns whether a HealthCheckResponse says SERVING; INTERNAL if `body` is not such a message.
absl::StatusOr<bool> IsServing(const grpc::ByteBuffer& body);

}  // namespace logprobd::client
