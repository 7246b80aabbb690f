#include "server/http/http_server.h"

#include <httplib.h>
#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/errors.h"
#include "server/http/http_address.h"

namespace logprobd {
namespace {

constexpr size_t kThreads = 8;
/// Accepted connections that wait for a thread; beyond it they wait in the kernel.
constexpr size_t kWaitingMax = 64;
constexpr int kListenBacklog = 512;
/// A client that neither sends nor reads for so long is dropped: it holds one of the threads.
constexpr time_t kReadTimeoutSeconds = 1;
constexpr time_t kWriteTimeoutSeconds = 5;

constexpr const char* kPlainText = "text/plain; charset=utf-8";
constexpr const char* kMetricsText = "text/plain; version=0.0.4; charset=utf-8";

/// The library's own pool takes any number of connections, each an open file. This one stops
/// accepting when enough wait.
class BoundedPool final : public httplib::TaskQueue {
 public:
  BoundedPool() {
    for (size_t i = 0; i < kThreads; ++i) {
      threads_.emplace_back([this] { Work(); });
    }
  }

  void enqueue(std::function<void()> task) override {
    const absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &BoundedPool::HasRoom));
    waiting_.push_back(std::move(task));
  }

  void shutdown() override {
    {
      const absl::MutexLock lock(&mutex_);
      is_stopping_ = true;
    }
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

 private:
  bool HasRoom() const { return waiting_.size() < kWaitingMax; }
  bool HasWork() const { return !waiting_.empty() || is_stopping_; }

  void Work() {
    while (true) {
      std::function<void()> task;
      {
        const absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(this, &BoundedPool::HasWork));
        if (waiting_.empty()) {
          return;
        }
        task = std::move(waiting_.front());
        waiting_.pop_front();
      }
      task();
    }
  }

  absl::Mutex mutex_;
  std::deque<std::function<void()>> waiting_;
  bool is_stopping_ = false;
  std::vector<std::thread> threads_;
};

/// The library's server with a longer backlog than its built-in 5, on which a burst of scrapers
/// would wait for a second's retransmission.
class Listener final : public httplib::Server {
 public:
  void WidenBacklog() { ::listen(svr_sock_, kListenBacklog); }
};

void Answer(httplib::Response& response, int status, const std::string& text) {
  response.status = status;
  response.set_content(text, kPlainText);
}

}  // namespace

struct HttpServer::Impl {
  Impl(Options server_options, const Metrics& server_metrics)
      : options(std::move(server_options)), metrics(server_metrics) {}

  void Configure();

  const Options options;
  const Metrics& metrics;
  Listener server;
  int port = 0;
  std::thread thread;
};

void HttpServer::Impl::Configure() {
  server.new_task_queue = [] { return new BoundedPool; };
  server.set_read_timeout(kReadTimeoutSeconds);
  server.set_write_timeout(kWriteTimeoutSeconds);
  // A connection that idles between two scrapes would hold a thread: one request each.
  server.set_keep_alive_max_count(1);
  server.set_payload_max_length(0);
  server.set_tcp_nodelay(true);
  // Not the library's default, which lets two processes share a port (SO_REUSEPORT).
  server.set_socket_options([](int socket) {
    const int on = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  });
  server.set_pre_routing_handler([](const httplib::Request& request, httplib::Response& response) {
    if (request.method == "GET" || request.method == "HEAD") {
      return httplib::Server::HandlerResponse::Unhandled;
    }
    response.set_header("Allow", "GET, HEAD");
    Answer(response, 405, "Only GET and HEAD are served here.\n");
    return httplib::Server::HandlerResponse::Handled;
  });
  server.set_error_handler([](const httplib::Request&, httplib::Response& response) {
    if (response.body.empty()) {
      Answer(response, response.status, "Not here: see /metrics, /healthz, /readyz and /.\n");
    }
  });
  server.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
    response.set_content(metrics.Serialize(), kMetricsText);
  });
  server.Get("/healthz", [](const httplib::Request&, httplib::Response& response) {
    Answer(response, 200, "ok\n");
  });
  server.Get("/readyz", [this](const httplib::Request&, httplib::Response& response) {
    const std::string reason = options.not_ready_reason ? options.not_ready_reason() : "";
    Answer(response, reason.empty() ? 200 : 503, reason.empty() ? "ready\n" : reason + "\n");
  });
  server.Get("/", [this](const httplib::Request&, httplib::Response& response) {
    Answer(response, 200, options.status_text ? options.status_text() : "");
  });
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpServer::~HttpServer() {
  impl_->server.stop();
  impl_->thread.join();
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Create(const Options& options,
                                                               const Metrics& metrics) {
  LOGPROBD_ASSIGN_OR_RETURN(const HttpAddress address, ParseHttpAddress(options.listen));
  auto impl = std::make_unique<Impl>(options, metrics);
  impl->Configure();
  if (address.port == 0) {
    impl->port = impl->server.bind_to_any_port(address.host);
  } else {
    impl->port = impl->server.bind_to_port(address.host, address.port) ? address.port : -1;
  }
  if (impl->port <= 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen for HTTP on ", options.listen,
                     ": the port is in use or the address is not this machine's"));
  }
  impl->server.WidenBacklog();
  impl->thread = std::thread([server = &impl->server] { server->listen_after_bind(); });
  // stop() has no effect before the loop runs, so the object exists only from then on.
  while (!impl->server.is_running()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

int HttpServer::port() const { return impl_->port; }

}  // namespace logprobd
