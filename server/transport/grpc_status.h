#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/status.h"

namespace logprobd {

/// Longest message sent to a client; headers have a limit of 8 KiB in all.
inline constexpr size_t kStatusMessageBytesMax = 1'024;

/// The message of `status` as a client may see it: valid UTF-8, cut at a character, and for what
/// has details for the log (errors.h: they name devices and files) a general sentence that names
/// `log_id`, under which the log has them.
std::string ClientMessage(const absl::Status& status, absl::string_view log_id = "this request_id");

grpc::Status ToGrpcStatus(const absl::Status& status, absl::string_view log_id = "this request_id");

/// As ToGrpcStatus with the whole message, for the admin listener: who may change the weights may
/// know the names of files and devices.
grpc::Status ToAdminStatus(const absl::Status& status);

/// The retry hint of `status` in milliseconds, 0: none.
uint32_t RetryAfterMs(const absl::Status& status);

/// Adds the retry hint of `status`, if it has one, to the trailing metadata
/// (`grpc-retry-pushback-ms`). Before Finish.
void AddRetryHint(const absl::Status& status, grpc::CallbackServerContext& context);

}  // namespace logprobd
