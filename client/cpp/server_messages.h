#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

// Full names of the methods that this library calls.
inline constexpr char kScoreMethod[] = "/logprobd.v1.Scoring/Score";
inline constexpr char kListHeadsMethod[] = "/logprobd.v1.Scoring/ListHeads";
inline constexpr char kVerifyMethod[] = "/logprobd.v1.Scoring/Verify";
inline constexpr char kHealthMethod[] = "/grpc.health.v1.Health/Check";
/// Service name in health requests.
inline constexpr char kScoringService[] = "logprobd.v1.Scoring";

// The following functions convert small messages between the wire format and this library's types.
// The parsers return INTERNAL if a message cannot be parsed.
grpc::ByteBuffer EncodeListHeads();
absl::StatusOr<ServerInfo> ParseListHeads(const grpc::ByteBuffer& body);
grpc::ByteBuffer EncodeVerify(const VerifyArgs& args);
absl::StatusOr<VerifyReport> ParseVerify(const grpc::ByteBuffer& body);

/// Encodes a grpc.health.v1.HealthCheckRequest by hand, because the generated code could clash with
/// another library's copy of it in the same process.
grpc::ByteBuffer EncodeHealthRequest(absl::string_view service);

/// Encodes a grpc.health.v1.HealthCheckResponse that says SERVING.
grpc::ByteBuffer EncodeServing();

/// Returns whether a HealthCheckResponse says SERVING. Returns INTERNAL if `body` is not such a
/// message.
absl::StatusOr<bool> IsServing(const grpc::ByteBuffer& body);

}  // namespace logprobd::client
