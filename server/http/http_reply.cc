#include "server/http/http_reply.h"

#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace logprobd {
namespace {

/// Default interval at which a browser reloads the status page, in seconds, and the longest one.
constexpr int kRefresh = 5;
constexpr int kRefreshMax = 3'600;

/// Returns a header or a parameter of the request's path, or an empty string if it is absent.
absl::string_view ValueOf(MHD_Connection* connection, MHD_ValueKind kind, const char* name) {
  return absl::NullSafeStringView(MHD_lookup_connection_value(connection, kind, name));
}

}  // namespace

bool SendReply(MHD_Connection* connection, const HttpReply& reply) {
  // The library does not change the buffer: it copies it.
  MHD_Response* const response = MHD_create_response_from_buffer(
      reply.body.size(), const_cast<char*>(reply.body.data()), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return false;
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, reply.content_type);
  for (const auto& [name, value] : reply.more_headers) {
    MHD_add_response_header(response, name, value);
  }
  const MHD_Result result =
      MHD_queue_response(connection, static_cast<unsigned int>(reply.status), response);
  MHD_destroy_response(response);  // the connection keeps a reference
  return result == MHD_YES;
}

HttpReply RefusalOf(const absl::Status& status) {
  HttpReply reply{.status = MHD_HTTP_UNAUTHORIZED, .body = absl::StrCat(status.message(), "\n")};
  if (absl::IsPermissionDenied(status)) {
    reply.status = MHD_HTTP_FORBIDDEN;
  } else {
    reply.more_headers = {{MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer"},
                          {MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Basic realm=\"logprobd\""}};
  }
  return reply;
}

std::string AuthorizationOf(MHD_Connection* connection) {
  return std::string(ValueOf(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION));
}

std::string PeerOf(MHD_Connection* connection) {
  const sockaddr* const address =
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS)->client_addr;
  const bool is_ipv6 = address->sa_family == AF_INET6;
  char host[NI_MAXHOST] = "";
  char port[sizeof("65535")] = "";
  getnameinfo(address, is_ipv6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in), host, sizeof(host),
              port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV);  // numbers ask no name server
  return is_ipv6 ? absl::StrCat("ipv6:[", host, "]:", port)
                 : absl::StrCat("ipv4:", host, ":", port);
}

bool WantsHtml(MHD_Connection* connection) {
  const absl::string_view format = ValueOf(connection, MHD_GET_ARGUMENT_KIND, "format");
  return format.empty()
             ? absl::StrContains(ValueOf(connection, MHD_HEADER_KIND, "Accept"), "text/html")
             : format == "html";
}

int RefreshOf(MHD_Connection* connection) {
  int seconds = 0;
  const bool is_valid =
      absl::SimpleAtoi(ValueOf(connection, MHD_GET_ARGUMENT_KIND, "refresh"), &seconds) &&
      seconds >= 0 && seconds <= kRefreshMax;
  return is_valid ? seconds : kRefresh;
}

}  // namespace logprobd
