#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd::client {

inline constexpr char kHealthMethod[] = "/grpc.health.v1.Health/Check";

/// A grpc.health.v1.HealthCheckRequest. Encoded by hand: two fields do not warrant a generated
/// package that other libraries of the process may also bring.
grpc::ByteBuffer EncodeHealthRequest(absl::string_view service);

/// A grpc.health.v1.HealthCheckResponse that says SERVING.
grpc::ByteBuffer EncodeServing();

/// Whether a HealthCheckResponse says SERVING. INTERNAL: not such a message.
absl::StatusOr<bool> IsServing(const grpc::ByteBuffer& body);

}  // namespace logprobd::client
