#pragma once

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace logprobd::internal {

/// Prints the violated invariant and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* expression,
                              const std::string& values);

}  // namespace logprobd::internal

/// Aborts if an invariant of this program is violated. The message contains the condition and the
/// other arguments, which are passed to absl::StrCat. Invalid input is reported by a Status
/// instead.
#define LOGPROBD_CHECK(condition, ...)                                                \
  do {                                                                                \
    if (!(condition)) {                                                               \
      ::logprobd::internal::CheckFailed(__FILE__, __LINE__, #condition,               \
                                        absl::StrCat("" __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                                 \
  } while (false)

namespace logprobd {

/// Adds a hint to a RESOURCE_EXHAUSTED or UNAVAILABLE status: how long the client should wait
/// before it retries. The transport sends the hint as `grpc-retry-pushback-ms` and, on a stream, in
/// the chunk's response.
absl::Status WithRetryAfter(absl::Status status, absl::Duration retry_after);

/// Returns the retry hint of `status`, if it has one.
std::optional<absl::Duration> RetryAfter(const absl::Status& status);

/// Marks a status whose message names devices, files or code. The message goes to the log, and the
/// transport sends a general sentence instead. INTERNAL and DATA_LOSS need no mark.
absl::Status WithDetailsForLog(absl::Status status);

/// Whether the message of `status` is for the log only.
bool HasDetailsForLog(const absl::Status& status);

/// Returns `status` with `prefix` and ": " before its message. The payloads are kept.
absl::Status WithContext(const absl::Status& status, absl::string_view prefix);

}  // namespace logprobd

/// Returns from the function when `expression`, a Status, is an error.
#define LOGPROBD_RETURN_IF_ERROR(expression)                  \
  do {                                                        \
    if (absl::Status status_ = (expression); !status_.ok()) { \
      return status_;                                         \
    }                                                         \
  } while (false)

#define LOGPROBD_INTERNAL_CONCAT2(a, b) a##b
#define LOGPROBD_INTERNAL_CONCAT(a, b) LOGPROBD_INTERNAL_CONCAT2(a, b)

// `target` is a declaration, which cannot be in parentheses.
// NOLINTBEGIN(bugprone-macro-parentheses)

/// Initialises the declaration `target` from a StatusOr, or returns its error.
#define LOGPROBD_ASSIGN_OR_RETURN(target, expression) \
  LOGPROBD_INTERNAL_ASSIGN(LOGPROBD_INTERNAL_CONCAT(status_or_, __LINE__), target, expression)
#define LOGPROBD_INTERNAL_ASSIGN(temporary, target, expression) \
  auto temporary = (expression);                                \
  if (!temporary.ok()) {                                        \
    return std::move(temporary).status();                       \
  }                                                             \
  target = *std::move(temporary)

// NOLINTEND(bugprone-macro-parentheses)

namespace logprobd {

/// Reasons why a request is refused before it is queued, as in the metric rejected_total.
enum class Rejection {
  kQueueRows,
  kQueueBytes,
  kQueueRequests,
  kClientShare,
  kDeadline,
  kDraining,
  kNotReady,
  kInvalid,
  kAnswerBytes,
  kUnauthenticated,
  kPermissionDenied
};

/// Adds the reason to `status`, for the metrics. Clients do not see it.
absl::Status WithRejection(absl::Status status, Rejection reason);

/// Returns the reason that `status` carries, or else the reason that follows from its code.
Rejection RejectionOf(const absl::Status& status);

}  // namespace logprobd
