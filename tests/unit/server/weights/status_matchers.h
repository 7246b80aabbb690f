#pragma once

#include <gmock/gmock.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace logprobd {

inline const absl::Status& StatusOf(const absl::Status& status) { return status; }

template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& status_or) {
  return status_or.status();
}

/// Matches a status with the given code and a message that contains `text`.
MATCHER_P2(Fails, code, text, "") {
  const absl::Status& status = StatusOf(arg);
  *result_listener << status.ToString();
  return status.code() == code && status.message().find(text) != absl::string_view::npos;
}

MATCHER(Succeeds, "") {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).ok();
}

}  // namespace logprobd
