#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/http/status_page.h"
#include "server/metrics/metrics.h"

namespace logprobd {

/// HTTP/1.1 server for operators. It serves /metrics, /healthz (200 while the process runs),
/// /readyz (200 when the server can score, otherwise 503 with the reason) and / (a status page).
/// /healthz and /readyz never wait for the other pages. A connection serves one request.
class HttpServer {
 public:
  /// Maximum size of the line and the headers of a request together with the headers of its
  /// response and what the library notes about them, in bytes per connection. A request that does
  /// not fit gets an error of HTTP or no response.
  static constexpr size_t kRequestBytesMax = 16'384;
  /// Maximum number of connections, in total and from one address (IPv6: from one /64 network). The
  /// next one replaces the oldest, so that clients that do not finish cannot lock others out.
  static constexpr size_t kConnectionsMax = 64;
  static constexpr size_t kAddressConnectionsMax = 32;
  /// Longest life of a connection, from its acceptance to the last byte of the response.
  static constexpr absl::Duration kExchangeTimeout = absl::Seconds(10);

  struct Options {
    /// Address as host:port; port 0 chooses a free port.
    std::string listen = "127.0.0.1:9470";
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

  /// Starts a server. Returns UNAVAILABLE if it cannot listen on the address and INVALID_ARGUMENT
  /// if the address is not valid; both messages name --http. Returns RESOURCE_EXHAUSTED if a thread
  /// cannot be started or no file descriptor is left. `metrics` and `clock`, which measures
  /// kExchangeTimeout, must outlive the server.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Create(const Options& options,
                                                            const Metrics& metrics,
                                                            const Clock& clock = Clock::Steady());
  /// Closes the open connections first, so that no client can delay the destructor.
  ~HttpServer();

  /// Returns the port on which the server listens.
  int port() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
