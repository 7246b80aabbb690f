#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/http/status_page.h"
#include "server/metrics/metrics.h"

namespace logprobd {

/// HTTP for operators: /metrics, /healthz (the process lives), /readyz (200 when it can score, else
/// 503 with the reason), / (a status page).
class HttpServer {
 public:
  struct Options {
    /// host:port; port 0 takes a free one.
    std::string listen = "127.0.0.1:9470";
    /// Empty string: ready; else why not. Called on a request's thread; must not block.
    std::function<std::string()> not_ready_reason;
    /// What /readyz says when it is ready; not set: "ready". As above.
    std::function<std::string()> ready_text;
    /// The status page in plain text. As above.
    std::function<std::string()> status_text;
    /// What is drawn of it for who takes HTML; empty: the text for everybody. Holds up its own
    /// request alone.
    std::function<StatusPage()> status_page;
  };

  /// UNAVAILABLE when the port is in use, INVALID_ARGUMENT for a bad address; they name --http.
  /// RESOURCE_EXHAUSTED when there are no threads.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Create(const Options& options,
                                                            const Metrics& metrics);
  /// Cuts the connections at hand: no client can delay it.
  ~HttpServer();

  int port() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
