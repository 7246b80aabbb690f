#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/http/status_page.h"
#include "server/metrics/metrics.h"

namespace logprobd {

/// HTTP/1.1 server for operators, over TLS 1.2 and 1.3 if its address is https://. It serves
/// /metrics, /healthz (200 while the process runs), /readyz (200 when the server can score,
/// otherwise 503 with the reason) and / (a status page). /healthz and /readyz never wait for the
/// other pages and are open to everybody. A connection serves one request.
class HttpServer {
 public:
  /// Maximum size of the line and the headers of a request together with the headers of its
  /// response and what the library notes about them, in bytes per connection. A request that does
  /// not fit gets an error of HTTP or no response.
  static constexpr size_t kRequestBytesMax = 16'384;
  /// Number of bytes that a client may send on a connection with TLS, handshake and request
  /// together, before the server closes it. The library would otherwise keep a message of the
  /// handshake whatever its size.
  static constexpr size_t kTlsBytesMax = 65'536;
  /// Maximum number of connections, in total and from one address (IPv6: from one /64 network). The
  /// next one replaces the oldest, so that clients that do not finish cannot lock others out.
  static constexpr size_t kConnectionsMax = 64;
  static constexpr size_t kAddressConnectionsMax = 32;
  /// Longest life of a connection, from its acceptance to the last byte of the response. It
  /// includes the TLS handshake.
  static constexpr absl::Duration kExchangeTimeout = absl::Seconds(10);

  /// A certificate, followed by its chain, and its private key, both as PEM.
  struct Certificate {
    std::string cert_pem = {};
    std::string key_pem = {};
  };

  struct Options {
    /// Address as host:port or https://host:port; port 0 chooses a free port.
    std::string listen = "127.0.0.1:9470";
    /// For an address that is https://. The server does not keep it.
    Certificate certificate;
    /// Returns whether a caller may have the page of `path`, which is any path but /healthz and
    /// /readyz. `authorization` is the value of the header of that name, or empty, and `peer` the
    /// caller's address, such as "ipv4:127.0.0.1:50312" or "ipv6:[::1]:50312". An error becomes the
    /// response: PERMISSION_DENIED has the status 403, any other one 401. If unset, everybody may
    /// have all pages. It is called like status_page.
    std::function<absl::Status(absl::string_view path, absl::string_view authorization,
                               absl::string_view peer)>
        check_access;
    /// Allows an address that CheckReachable refuses.
    bool insecure = false;
    /// Returns why the server is not ready, or an empty string if it is ready. It is called on the
    /// thread that serves all connections and must not block.
    std::function<std::string()> not_ready_reason;
    /// Returns the text of /readyz when the server is ready. If unset, the text is "ready". It is
    /// called like not_ready_reason.
    std::function<std::string()> ready_text;
    /// Returns the first part of the status page in plain text. It is called like status_page.
    std::function<std::string()> status_text;
    /// Returns the contents of the HTML status page; the text page also shows its latencies. If
    /// unset, all clients get only `status_text`. It is called on several threads at once and may
    /// block, which delays only its own request.
    std::function<StatusPage()> status_page;
  };

  /// Starts a server. Returns UNAVAILABLE if it cannot listen on the address, INVALID_ARGUMENT if
  /// the address or the certificate is not valid, and FAILED_PRECONDITION if CheckReachable refuses
  /// the address; the messages name --http. Returns RESOURCE_EXHAUSTED if a thread cannot be
  /// started or no file descriptor is left. `metrics` and `clock`, which measures kExchangeTimeout,
  /// must outlive the server.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Create(Options options, const Metrics& metrics,
                                                            const Clock& clock = Clock::Steady());
  /// Closes the open connections first, so that no client can delay the destructor.
  ~HttpServer();

  /// Takes another certificate for connections that are accepted from now on. Returns
  /// INVALID_ARGUMENT if TLS cannot use it, and RESOURCE_EXHAUSTED if no file descriptor is left;
  /// the server then keeps the one it has. Does nothing if the address is not https://. Must be
  /// called from one thread. `certificate` may end with the call.
  absl::Status SetCertificate(const Certificate& certificate);

  /// Returns the port on which the server listens.
  int port() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
