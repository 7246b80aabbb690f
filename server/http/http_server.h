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
    /// Returns why the server is not ready, or an empty string if it is ready. Called on a
    /// request's thread; must not block.
    std::function<std::string()> not_ready_reason;
    /// Returns what /readyz says when the server is ready. Unset: "ready". Called like the function
    /// above.
    std::function<std::string()> ready_text;
    /// Returns the first part of the status page in plain text. Called like the function above.
    std::function<std::string()> status_text;
    /// Returns the contents of the HTML status page; the text page shows its latencies too. Unset:
    /// everybody gets `status_text` alone. It may block, which only delays its own request.
    std::function<StatusPage()> status_page;
  };

  /// UNAVAILABLE: the port is in use. INVALID_ARGUMENT: bad address. Both name --http.
  /// RESOURCE_EXHAUSTED: no thread could be started.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Create(const Options& options,
                                                            const Metrics& metrics);
  /// Shuts down the open connections, so that no client can delay the destructor.
  ~HttpServer();

  /// The port on which the server listens.
  int port() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
