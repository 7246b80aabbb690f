#include "server/transport/grpc_status.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/base/errors.h"
#include "server/base/text.h"

namespace logprobd {
namespace {

absl::string_view WithoutDetails(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kResourceExhausted:
      return "the engine has no memory for the batch";
    case absl::StatusCode::kInternal:
      return "internal error";
    default:
      return "the server failed";
  }
}

}  // namespace

std::string ClientMessage(const absl::Status& status, absl::string_view log_id) {
  if (HasDetailsForLog(status)) {
    return absl::StrCat(WithoutDetails(status.code()), "; the server's log has the details under ",
                        log_id);
  }
  // A message may quote text of a client or a file, and one byte of invalid UTF-8 would make a
  // client reject the whole response.
  return std::string(CutUtf8(ToUtf8(status.message()), kStatusMessageBytesMax));
}

grpc::Status ToGrpcStatus(const absl::Status& status, absl::string_view log_id) {
  if (status.ok()) return grpc::Status::OK;
  // Both enums have the same values.
  return {static_cast<grpc::StatusCode>(status.code()), ClientMessage(status, log_id)};
}

grpc::Status ToAdminStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()),
          std::string(CutUtf8(ToUtf8(status.message()), kStatusMessageBytesMax))};
}

uint32_t RetryAfterMs(const absl::Status& status) {
  const std::optional<absl::Duration> hint = RetryAfter(status);
  if (!hint.has_value()) return 0;
  const int64_t milliseconds = absl::ToInt64Milliseconds(*hint);
  return static_cast<uint32_t>(
      std::clamp<int64_t>(milliseconds, 1, std::numeric_limits<int32_t>::max()));
}

void AddRetryHint(const absl::Status& status, grpc::CallbackServerContext& context) {
  if (const uint32_t milliseconds = RetryAfterMs(status); milliseconds != 0) {
    context.AddTrailingMetadata("grpc-retry-pushback-ms", absl::StrCat(milliseconds));
  }
}

}  // namespace logprobd
