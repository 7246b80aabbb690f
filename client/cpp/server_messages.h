#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/server_info.h"

namespace logprobd::client {

/// Full names of the methods this library calls; that of health is in health.h.
inline constexpr char kScoreMethod[] = "/logprobd.v1.Scoring/Score";
inline constexpr char kScoreStreamMethod[] = "/logprobd.v1.Scoring/ScoreStream";
inline constexpr char kListHeadsMethod[] = "/logprobd.v1.Scoring/ListHeads";
inline constexpr char kVerifyMethod[] = "/logprobd.v1.Scoring/Verify";
/// The name under which health is asked.
inline constexpr char kScoringService[] = "logprobd.v1.Scoring";

/// The small messages, between the wire and this library's types. A parse that fails is INTERNAL.
grpc::ByteBuffer EncodeListHeads();
absl::StatusOr<ServerInfo> ParseListHeads(const grpc::ByteBuffer& body);
grpc::ByteBuffer EncodeVerify(const VerifyArgs& args);
absl::StatusOr<VerifyReport> ParseVerify(const grpc::ByteBuffer& body);

inline constexpr char kHealthMethod[] = "/grpc.health.v1.Health/Check";

/// A grpc.health.v1.HealthCheckRequest. Encoded by hand: two fields do not warrant a generated
/// package that other libraries of the process may also bring.
grpc::ByteBuffer EncodeHealthRequest(absl::string_view service);

/// A grpc.health.v1.HealthCheckResponse that says SERVING.
grpc::ByteBuffer EncodeServing();

/// Whether a HealthCheckResponse says SERVING. INTERNAL: not such a message.
absl::StatusOr<bool> IsServing(const grpc::ByteBuffer& body);

}  // namespace logprobd::client
