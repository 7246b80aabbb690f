#include "server/http/http_server.h"

#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/base/listen_address.h"
#include "server/http/connections.h"

namespace logprobd {
namespace {

constexpr size_t kThreads = 8;
/// Accepted connections that wait for a thread; beyond it they wait in the kernel.
constexpr size_t kWaitingMax = 64;
constexpr int kListenBacklog = 512;
/// A client that neither sends nor reads for so long is dropped: it holds one of the threads.
constexpr std::chrono::milliseconds kReadTimeout{1'000};
constexpr std::chrono::milliseconds kWriteTimeout{5'000};
/// So is one that does so a byte now and then, after so long in all.
constexpr std::chrono::milliseconds kExchangeTimeout{10'000};

constexpr const char* kPlainText = "text/plain; charset=utf-8";
constexpr const char* kHtml = "text/html; charset=utf-8";
/// A page is what it says and nothing else, whatever a head is called.
constexpr const char* kContentPolicy =
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'";
/// Time after which a browser loads the status page again, in seconds.
constexpr int kRefresh = 5;
constexpr int kRefreshMax = 3'600;
constexpr const char* kMetricsText = "text/plain; version=0.0.4; charset=utf-8";

/// The library's own pool takes any number of connections, each an open file. This one stops
/// accepting when enough wait.
class BoundedPool final : public httplib::TaskQueue {
 public:
  static absl::StatusOr<std::unique_ptr<BoundedPool>> Create() {
    auto pool = std::make_unique<BoundedPool>();
    for (size_t i = 0; i < kThreads; ++i) {
      LOGPROBD_ASSIGN_OR_RETURN(std::thread thread,
                                StartThread("http-worker", [pool = pool.get()] { pool->Work(); }));
      pool->threads_.push_back(std::move(thread));
    }
    return pool;
  }

  ~BoundedPool() override { shutdown(); }

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
    threads_.clear();
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

/// A client's socket as the library reads and writes it, with a bound on the whole exchange: the
/// library's own bounds each byte.
class BoundedStream final : public httplib::Stream {
 public:
  explicit BoundedStream(int socket) : socket_(socket) {}

  bool is_readable() const override { return begin_ < end_ || Await(POLLIN, kReadTimeout); }
  bool is_writable() const override { return Await(POLLOUT, kWriteTimeout); }

  ssize_t read(char* out, size_t size) override {
    if (begin_ == end_) {
      if (!Await(POLLIN, kReadTimeout)) {
        return -1;
      }
      const ssize_t got = recv(socket_, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
      if (got <= 0) {
        return got;
      }
      begin_ = 0;
      end_ = static_cast<size_t>(got);
    }
    const size_t count = std::min(size, end_ - begin_);
    std::memcpy(out, buffer_.data() + begin_, count);
    begin_ += count;
    return static_cast<ssize_t>(count);
  }

  ssize_t write(const char* data, size_t size) override {
    // Whole: some versions of the library do not look at how much was written.
    for (size_t done = 0; done < size;) {
      if (!Await(POLLOUT, kWriteTimeout)) {
        return -1;
      }
      const ssize_t sent = send(socket_, data + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno != EAGAIN && errno != EINTR) {
        return -1;
      }
      done += static_cast<size_t>(std::max<ssize_t>(sent, 0));
    }
    return static_cast<ssize_t>(size);
  }

  // Asked for each request; nothing of ours uses them.
  void get_remote_ip_and_port(std::string& /*ip*/, int& /*port*/) const override {}
  void get_local_ip_and_port(std::string& /*ip*/, int& /*port*/) const override {}
  int socket() const override { return socket_; }

 private:
  /// False when the socket is not ready within `timeout` or the exchange's.
  bool Await(int16_t events, std::chrono::milliseconds timeout) const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        end_of_exchange_ - std::chrono::steady_clock::now());
    pollfd waited{socket_, events, 0};
    int ready = 0;
    do {
      ready = poll(&waited, 1, static_cast<int>(std::max(std::min(timeout, left).count(), 0L)));
    } while (ready < 0 && errno == EINTR);
    return ready > 0;
  }

  const int socket_;
  const std::chrono::steady_clock::time_point end_of_exchange_ =
      std::chrono::steady_clock::now() + kExchangeTimeout;
  std::array<char, 4'096> buffer_{};
  size_t begin_ = 0;  ///< Of what has been received and not yet read.
  size_t end_ = 0;
};

/// The library's server with a longer backlog than its built-in 5, on which a burst of scrapers
/// would wait for a second's retransmission, and with connections that can be ended.
class Listener final : public httplib::Server {
 public:
  void WidenBacklog() { ::listen(svr_sock_, kListenBacklog); }

  /// As stop(), which alone would wait for clients.
  void StopAtOnce() {
    stop();
    connections_.ShutDown();
  }

 private:
  bool process_and_close_socket(int socket) override {
    const Connections::Scope scope(connections_, socket);
    BoundedStream stream(socket);
    bool is_closed = false;
    // Closed after one request: a connection that idles between two scrapes would hold a thread.
    return process_request(stream, /*close_connection=*/true, is_closed, nullptr);
  }

  Connections connections_;
};

void Answer(httplib::Response& response, int status, const std::string& text) {
  response.status = status;
  response.set_content(text, kPlainText);
}

/// Whether the status page is to be HTML: as `format` says, else if the client says that it takes
/// HTML. Browsers do; curl takes anything and gets text.
bool WantsHtml(const httplib::Request& request) {
  const std::string format = request.get_param_value("format");
  return format.empty() ? absl::StrContains(request.get_header_value("Accept"), "text/html")
                        : format == "html";
}

/// Seconds of `refresh`, or the default for what is no such number.
int RefreshOf(const httplib::Request& request) {
  int seconds = 0;
  const bool is_valid = absl::SimpleAtoi(request.get_param_value("refresh"), &seconds) &&
                        seconds >= 0 && seconds <= kRefreshMax;
  return is_valid ? seconds : kRefresh;
}

}  // namespace

struct HttpServer::Impl {
  Impl(Options server_options, const Metrics& server_metrics)
      : options(std::move(server_options)), metrics(server_metrics) {}

  void Configure();

  const Options options;
  const Metrics& metrics;
  std::unique_ptr<BoundedPool> pool;  ///< The library's once it listens.
  Listener server;
  int port = 0;
  std::thread thread;
};

void HttpServer::Impl::Configure() {
  server.new_task_queue = [this] { return pool.release(); };
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
    const std::string ready = options.ready_text ? options.ready_text() : "ready";
    Answer(response, reason.empty() ? 200 : 503, (reason.empty() ? ready : reason) + "\n");
  });
  server.Get("/", [this](const httplib::Request& request, httplib::Response& response) {
    response.set_header("Vary", "Accept");
    response.set_header("Cache-Control", "no-store");
    if (!options.status_page || !WantsHtml(request)) {
      Answer(response, 200, options.status_text ? options.status_text() : "");
      return;
    }
    response.set_header("Content-Security-Policy", kContentPolicy);
    response.set_header("X-Content-Type-Options", "nosniff");
    response.set_content(RenderStatusPage(options.status_page(), RefreshOf(request)), kHtml);
  });
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpServer::~HttpServer() {
  impl_->server.StopAtOnce();
  impl_->thread.join();
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Create(const Options& options,
                                                               const Metrics& metrics) {
  LOGPROBD_ASSIGN_OR_RETURN(const ListenAddress address,
                            ParseListenAddress("--http", options.listen));
  auto impl = std::make_unique<Impl>(options, metrics);
  LOGPROBD_ASSIGN_OR_RETURN(impl->pool, BoundedPool::Create());
  impl->Configure();
  if (address.port == 0) {
    impl->port = impl->server.bind_to_any_port(address.host);
  } else {
    impl->port = impl->server.bind_to_port(address.host, address.port) ? address.port : -1;
  }
  if (impl->port <= 0) {
    return absl::UnavailableError(
        absl::StrCat("--http: cannot listen on ", options.listen,
                     ": the port is in use or the address is not this machine's"));
  }
  impl->server.WidenBacklog();
  LOGPROBD_ASSIGN_OR_RETURN(
      impl->thread, StartThread("http", [server = &impl->server] { server->listen_after_bind(); }));
  // stop() has no effect before the loop runs, so the object exists only from then on.
  while (!impl->server.is_running()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

int HttpServer::port() const { return impl_->port; }

}  // namespace logprobd
