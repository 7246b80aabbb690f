#include "server/http/http_server.h"

#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/base/listen_address.h"

namespace logprobd {
namespace {

constexpr size_t kThreads = 8;
/// Maximum number of accepted connections that wait for a thread; further ones wait in the kernel.
constexpr size_t kWaitingMax = 64;
constexpr int kListenBacklog = 512;
/// Longest time for which the server waits for a client to send or to read a piece of data. After
/// that it drops the client, which occupies a thread.
constexpr std::chrono::milliseconds kReadTimeout{1'000};
constexpr std::chrono::milliseconds kWriteTimeout{5'000};
/// Longest duration of a whole exchange. It bounds clients that send or read a byte now and then.
constexpr std::chrono::milliseconds kExchangeTimeout{10'000};

constexpr const char* kPlainText = "text/plain; charset=utf-8";
constexpr const char* kHtml = "text/html; charset=utf-8";
/// Prevents browsers from loading or running anything, whatever names the page shows.
constexpr const char* kContentPolicy =
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'";
/// Default interval at which a browser reloads the status page, in seconds, and the longest one.
constexpr int kRefresh = 5;
constexpr int kRefreshMax = 3'600;
constexpr const char* kMetricsText = "text/plain; version=0.0.4; charset=utf-8";

/// The threads that serve requests. The library's own pool accepts any number of connections, each
/// of which is an open file; this pool stops accepting when kWaitingMax connections wait.
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

/// The stream through which the library reads and writes a client's socket. It bounds the time of
/// the whole exchange; the library's own stream bounds only the time per byte.
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
    // Writes everything, because some versions of the library ignore how much was written.
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

  // The library calls these functions for each request, but the server does not use the results.
  void get_remote_ip_and_port(std::string& /*ip*/, int& /*port*/) const override {}
  void get_local_ip_and_port(std::string& /*ip*/, int& /*port*/) const override {}
  int socket() const override { return socket_; }

 private:
  /// Returns false if the socket is not ready within `timeout` or before the exchange must end.
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
  size_t begin_ = 0;  ///< Bytes [begin_, end_) are received but not yet read.
  size_t end_ = 0;
};

/// Holds the sockets of the requests in progress. The server can shut them down, so that it does
/// not wait for clients that neither send nor read. Thread-safe.
class Connections {
 public:
  /// Registers a socket for the lifetime of this object, then closes it.
  class Scope {
   public:
    Scope(Connections& connections, int socket) : connections_(connections), socket_(socket) {
      const absl::MutexLock lock(&connections_.mutex_);
      connections_.sockets_.insert(socket_);
      if (connections_.is_shut_down_) {
        ::shutdown(socket_, SHUT_RDWR);
      }
    }
    ~Scope() {
      {
        // The socket is removed under the lock before it is closed, because another file may reuse
        // its number immediately afterwards.
        const absl::MutexLock lock(&connections_.mutex_);
        connections_.sockets_.erase(socket_);
      }
      ::shutdown(socket_, SHUT_RDWR);
      close(socket_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Connections& connections_;
    const int socket_;
  };

  /// Shuts down all registered sockets and those of later Scopes, so that waits on them end.
  void ShutDown() {
    const absl::MutexLock lock(&mutex_);
    is_shut_down_ = true;
    for (const int socket : sockets_) {
      ::shutdown(socket, SHUT_RDWR);
    }
  }

 private:
  absl::Mutex mutex_;
  bool is_shut_down_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_set<int> sockets_ ABSL_GUARDED_BY(mutex_);
};

/// The library's server with two changes: the backlog is longer, and connections can be shut down.
/// With the built-in backlog of 5, a burst of scrapers would wait a second for a retransmission.
class Listener final : public httplib::Server {
 public:
  void WidenBacklog() { ::listen(svr_sock_, kListenBacklog); }

  /// Stops the server without waiting for clients, as stop() would.
  void StopAtOnce() {
    stop();
    connections_.ShutDown();
  }

 private:
  bool process_and_close_socket(int socket) override {
    const Connections::Scope scope(connections_, socket);
    BoundedStream stream(socket);
    bool is_closed = false;
    // Closes the connection after one request, because a connection that is idle between two
    // scrapes would occupy a thread.
    return process_request(stream, /*close_connection=*/true, is_closed, nullptr);
  }

  Connections connections_;
};

void Answer(httplib::Response& response, int status, const std::string& text) {
  response.status = status;
  response.set_content(text, kPlainText);
}

/// Returns true if the status page must be sent as HTML: if the parameter `format` is html, or if
/// it is absent and the client accepts text/html. Browsers do; curl accepts every type and gets
/// text.
bool WantsHtml(const httplib::Request& request) {
  const std::string format = request.get_param_value("format");
  return format.empty() ? absl::StrContains(request.get_header_value("Accept"), "text/html")
                        : format == "html";
}

/// Returns the parameter `refresh` in seconds, or the default if it is absent or not valid.
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
  std::unique_ptr<BoundedPool> pool;  ///< Owned by `server` once it listens.
  Listener server;
  int port = 0;
  std::thread thread;
};

void HttpServer::Impl::Configure() {
  server.new_task_queue = [this] { return pool.release(); };
  server.set_payload_max_length(0);
  server.set_tcp_nodelay(true);
  // Replaces the library's default, which lets two processes share a port (SO_REUSEPORT).
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
    if (!response.body.empty()) {
      return;
    }
    // The connection preface of HTTP/2, which every gRPC client sends first, is also a bad request.
    // The client recognizes the response as HTTP/1.1.
    Answer(response, response.status,
           response.status == 400
               ? "Bad request. This is the --http port, which speaks HTTP/1.1 only; gRPC clients "
                 "connect to the --listen port.\n"
               : "Not found. See /metrics, /healthz, /readyz and /.\n");
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
      Answer(response, 200,
             absl::StrCat(options.status_text ? options.status_text() : "",
                          options.status_page ? RenderLatencyText(options.status_page()) : "",
                          "\nSee /metrics, /healthz and /readyz.\n"));
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
                     ": the port is in use or the address does not belong to this machine"));
  }
  impl->server.WidenBacklog();
  LOGPROBD_ASSIGN_OR_RETURN(
      impl->thread, StartThread("http", [server = &impl->server] { server->listen_after_bind(); }));
  // stop() has no effect before the loop runs, so this function waits for the loop before it
  // returns the object.
  while (!impl->server.is_running()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

int HttpServer::port() const { return impl_->port; }

}  // namespace logprobd
