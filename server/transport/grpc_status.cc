#include "server/transport/grpc_status.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/base/errors.h"

namespace logprobd {
namespace {

constexpr absl::string_view kInternalMessage =
    "internal error: the server's log has the details under this request_id";

absl::string_view Cut(absl::string_view text) {
  if (text.size() <= kStatusMessageBytesMax) {
    return text;
  }
  size_t length = kStatusMessageBytesMax;
  while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) {
    --length;  // do not cut a UTF-8 sequence
  }
  return text.substr(0, length);
}

}  // namespace

absl::string_view ClientMessage(const absl::Status& status) {
  return status.code() == absl::StatusCode::kInternal ? kInternalMessage : Cut(status.message());
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) {
    return grpc::Status::OK;
  }
  // Both number their codes alike.
  return {static_cast<grpc::StatusCode>(status.code()), std::string(ClientMessage(status))};
}

uint32_t RetryAfterMs(const absl::Status& status) {
  const std::optional<absl::Duration> hint = RetryAfter(status);
  if (!hint.has_value()) {
    return 0;
  }
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
