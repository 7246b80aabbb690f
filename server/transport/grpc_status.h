#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/status.h"

namespace logprobd {

/// Longest message sent to a client; headers have a limit of 8 KiB in all.
inline constexpr size_t kStatusMessageBytesMax = 1'024;

/// The message of `status` as a client may see it: cut at a character, and for INTERNAL a general
/// sentence, since the details name devices and files and belong into the log.
absl::string_view ClientMessage(const absl::Status& status);

grpc::Status ToGrpcStatus(const absl::Status& status);

/// The retry hint of `status` in milliseconds, 0: none.
uint32_t RetryAfterMs(const absl::Status& status);

/// Adds the retry hint of `status`, if it has one, to the trailing metadata
/// (`grpc-retry-pushback-ms`). Before Finish.
void AddRetryHint(const absl::Status& status, grpc::CallbackServerContext& context);

}  // namespace logprobd
