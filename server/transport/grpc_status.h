#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/status.h"

namespace logprobd {

/// Maximum size in bytes of a status message that is sent to a client. gRPC limits all headers
/// together to 8 KiB.
inline constexpr size_t kStatusMessageBytesMax = 1'024;

/// Returns the message of `status` for a client as valid UTF-8, truncated between two characters.
/// For a status with details for the log (HasDetailsForLog), returns a general sentence instead,
/// which names `log_id`, the id of the log line.
std::string ClientMessage(const absl::Status& status, absl::string_view log_id = "this request_id");

/// Converts `status` to a gRPC status with its ClientMessage.
grpc::Status ToGrpcStatus(const absl::Status& status, absl::string_view log_id = "this request_id");

/// Converts `status` to a gRPC status with its own message, for the admin listener: a client that
/// may change the weights may also see the names of files and devices.
grpc::Status ToAdminStatus(const absl::Status& status);

/// Returns the retry hint of `status` in milliseconds, or 0 when it has none.
uint32_t RetryAfterMs(const absl::Status& status);

/// Adds the retry hint of `status`, if it has one, to the trailing metadata
/// (`grpc-retry-pushback-ms`). Call it before Finish.
void AddRetryHint(const absl::Status& status, grpc::CallbackServerContext& context);

}  // namespace logprobd
