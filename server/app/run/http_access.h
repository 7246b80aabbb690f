#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/metrics/metrics.h"
#include "server/transport/access_list.h"

namespace logprobd {

/// Decides who may have the pages of the HTTP listener. Thread-safe.
class HttpAccess {
 public:
  /// `metrics` must outlive the object.
  HttpAccess(std::shared_ptr<const AccessList> access, Metrics& metrics);

  /// Returns OK if `authorization`, the value of the header of that name, has a token with the
  /// scope `metrics`: "Bearer TOKEN", or "Basic" with the token as the password of any user, which
  /// browsers and Prometheus send. Other callers get an error of AccessList::Check, are counted
  /// and, for some of them, logged with their address, `peer`.
  absl::Status Check(absl::string_view path, absl::string_view authorization,
                     absl::string_view peer);

 private:
  const std::shared_ptr<const AccessList> access_;
  AccessRefusals refusals_;
};

}  // namespace logprobd
