#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/http/status_page.h"
#include "server/metrics/metrics.h"

namespace logprobd {

/// HTTP/1.1 server for operators. It serves /metrics, /healthz (200 while the process runs),
/// /readyz (200 when the server can score, otherwise 503 with the reason) and / (a status page).
class HttpServer {
 public:
  struct Options {
    /// Address as host:port; port 0 chooses a free port.
    std::string listen = "127.0.0.1:9470";
    /// Returns why the server is not ready, or an empty string if it is ready. It is called on the
    /// thread of a request and must not block.
    std::function<std::string()> not_ready_reason;
    /// Returns the text of /readyz when the server is ready. If unset, the text is "ready". It is
    /// called like not_ready_reason.
    std::function<std::string()> ready_text;
    /// Returns the first part of the status page in plain text. It is called like not_ready_reason.
    std::function<std::string()> status_text;
    /// Returns the contents of the HTML status page; the text page also shows its latencies. If
    /// unset, all clients get only `status_text`. It may block, which delays only its own request.
    std::function<StatusPage()> status_page;
  };

  /// Starts a server. Returns UNAVAILABLE if it cannot listen on the address and INVALID_ARGUMENT
  /// if the address is not valid; both messages name --http. Returns RESOURCE_EXHAUSTED if a thread
  /// cannot be started.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Create(const Options& options,
                                                            const Metrics& metrics);
  /// Shuts down the open connections first, so that no client can delay the destructor.
  ~HttpServer();

  /// Returns the port on which the server listens.
  int port() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
