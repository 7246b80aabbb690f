#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

struct MHD_Connection;

namespace logprobd {

inline constexpr const char* kPlainText = "text/plain; charset=utf-8";

/// A response of the HTTP server.
struct HttpReply {
  int status = 200;
  std::string body = {};
  const char* content_type = kPlainText;
  std::vector<std::pair<const char*, const char*>> more_headers = {};
};

/// Sends `reply` as the last one of its connection. Returns false if the library cannot.
bool SendReply(MHD_Connection* connection, const HttpReply& reply);

/// Returns the reply to a caller who may not have a page: 403 for PERMISSION_DENIED, otherwise 401.
HttpReply RefusalOf(const absl::Status& status);

/// Returns the value of the header Authorization, or an empty string if it is absent.
std::string AuthorizationOf(MHD_Connection* connection);

/// Returns the client's address as "ipv4:127.0.0.1:50312" or "ipv6:[::1]:50312".
std::string PeerOf(MHD_Connection* connection);

/// Returns true if the status page must be sent as HTML: if the parameter `format` is html, or if
/// it is absent and the client accepts text/html. Browsers do; curl accepts every type and gets
/// text.
bool WantsHtml(MHD_Connection* connection);

/// Returns the parameter `refresh` in seconds, or the default if it is absent or not valid.
int RefreshOf(MHD_Connection* connection);

}  // namespace logprobd
