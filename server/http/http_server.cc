#include "server/http/http_server.h"

#include <gnutls/gnutls.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <list>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/base/errors.h"
#include "server/base/file_descriptor.h"
#include "server/base/host.h"
#include "server/base/listen_address.h"
#include "server/base/peer_network.h"
#include "server/http/http_reply.h"

namespace logprobd {
namespace {

/// Threads that compute /metrics and the status page, which may wait for the driver of the GPUs.
constexpr int kPageThreads = 4;
/// Pause before the next attempt to accept when no file descriptor is left.
constexpr int kOutOfFilesPauseMs = 50;

constexpr const char* kHtml = "text/html; charset=utf-8";
/// Prevents browsers from loading or running anything, whatever names the page shows.
constexpr const char* kContentPolicy =
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'";
constexpr const char* kMetricsText = "text/plain; version=0.0.4; charset=utf-8";
/// What clients may speak, in the form of GnuTLS, which the library uses.
constexpr const char* kTlsPriorities = "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2";

/// A reply that a page thread computes while the connection is suspended.
struct Page {
  std::function<HttpReply()> compute;
  /// The suspended connection; null once it is resumed. Guarded by Impl::mutex, as `reply` is.
  MHD_Connection* waiting = nullptr;
  std::optional<HttpReply> reply = std::nullopt;  ///< Empty if the connection was dropped before.
};

/// A connection and its only request.
struct Exchange {
  MHD_Daemon* daemon = nullptr;
  size_t tls_bytes = 0;  ///< Received; counted with TLS only.
  int socket = -1;       ///< The library's. Open for the lifetime of this object.
  std::string address;   ///< As from PeerNetworkOf.
  absl::Time deadline;
  std::shared_ptr<Page> page = nullptr;  ///< Null until a page is requested.
};

/// An instance of the library. Each certificate needs one of its own.
struct Daemon {
  ~Daemon() {
    if (handle != nullptr) MHD_stop_daemon(handle);
  }
  MHD_Daemon* handle = nullptr;
};

/// Reads for GnuTLS what the client of an Exchange has sent, up to kTlsBytesMax, where it reports
/// the end of the connection.
ssize_t ReceiveTls(gnutls_transport_ptr_t exchange_pointer, void* data, size_t size) {
  Exchange& exchange = *static_cast<Exchange*>(exchange_pointer);
  const size_t left = HttpServer::kTlsBytesMax - exchange.tls_bytes;
  if (left == 0) return 0;
  const ssize_t got = recv(exchange.socket, data, std::min(size, left), 0);
  exchange.tls_bytes += static_cast<size_t>(std::max<ssize_t>(got, 0));
  return got;
}

MHD_Result Send(MHD_Connection* connection, const HttpReply& reply) {
  return SendReply(connection, reply) ? MHD_YES : MHD_NO;
}

/// Keeps escapes in a path as they are: no path that is served has any.
size_t KeepEscapes(void* /*unused*/, MHD_Connection* /*connection*/, char* text) {
  return std::strlen(text);
}

}  // namespace

// One thread, `thread`, accepts connections and runs the library, and nothing on it blocks. It
// suspends the connections that ask for a page until a page thread has computed their reply.
struct HttpServer::Impl {
  Impl(Options server_options, const Metrics& server_metrics, const Clock& server_clock)
      : options(std::move(server_options)), metrics(server_metrics), clock(server_clock) {}
  ~Impl();

  absl::Status Start(const ListenAddress& address, const Certificate& certificate);
  absl::StatusOr<std::unique_ptr<Daemon>> StartDaemon(const Certificate& certificate);
  absl::Status SetCertificate(const Certificate& certificate);

  // On `thread`.
  void Run();
  void Poll(bool is_out_of_files);
  int PollMilliseconds(bool is_out_of_files);
  /// Accepts a waiting connection, if there is one. Returns false if no file descriptor is left.
  bool Accept(int listener);
  /// Makes the library close the connection when it runs next.
  void Drop(Exchange& exchange);
  void Notify(MHD_Connection* connection, void** context, MHD_ConnectionNotificationCode code);
  MHD_Result Answer(MHD_Connection* connection, absl::string_view path, absl::string_view method);
  MHD_Result SendPage(MHD_Connection* connection, Exchange& exchange, absl::string_view path);

  // On the page threads.
  void ComputePages();
  HttpReply StatusReply(bool wants_html, int refresh_seconds) const;
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return !pages.empty() || is_stopping;
  }

  /// Makes the library continue with the connection, if it is still suspended. Any thread.
  void Resume(Page& page) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  /// Makes `thread` look for resumed connections and for the end. Any thread.
  void Wake();

  const Options options;  ///< Without its certificate, whose key would stay in memory.
  const Metrics& metrics;
  const Clock& clock;
  ListeningSockets listening;
  FileDescriptor wake;  ///< An eventfd.
  bool is_https = false;
  /// The last one gets the new connections; the others end when theirs have. Used only by `thread`
  /// while it runs, as `exchanges` is.
  std::vector<std::unique_ptr<Daemon>> daemons;
  std::list<Exchange> exchanges;  ///< Oldest first.

  absl::Mutex mutex;
  std::deque<std::shared_ptr<Page>> pages ABSL_GUARDED_BY(mutex);  ///< Not yet started.
  bool is_stopping ABSL_GUARDED_BY(mutex) = false;
  std::unique_ptr<Daemon> next_daemon ABSL_GUARDED_BY(mutex);  ///< For the next connection.

  std::vector<std::thread> page_threads;
  std::thread thread;
};

absl::Status HttpServer::Impl::Start(const ListenAddress& address, const Certificate& certificate) {
  is_https = address.is_https;
  LOGPROBD_ASSIGN_OR_RETURN(listening, ListenOn("--http", address));
  wake = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.is_open()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("--http: cannot start the server: ", std::strerror(errno)));
  }
  LOGPROBD_ASSIGN_OR_RETURN(daemons.emplace_back(), StartDaemon(certificate));
  for (int i = 0; i < kPageThreads; ++i) {
    LOGPROBD_ASSIGN_OR_RETURN(std::thread started,
                              StartThread("http-page", [this] { ComputePages(); }));
    page_threads.push_back(std::move(started));
  }
  LOGPROBD_ASSIGN_OR_RETURN(thread, StartThread("http", [this] { Run(); }));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Daemon>> HttpServer::Impl::StartDaemon(
    const Certificate& certificate) {
  const MHD_AccessHandlerCallback answer = [](void* impl, MHD_Connection* connection,
                                              const char* path, const char* method, const char*,
                                              const char*, size_t*, void**) {
    return static_cast<Impl*>(impl)->Answer(connection, path, method);
  };
  const MHD_NotifyConnectionCallback notify = [](void* impl, MHD_Connection* connection,
                                                 void** context,
                                                 MHD_ConnectionNotificationCode code) {
    static_cast<Impl*>(impl)->Notify(connection, context, code);
  };
  auto daemon = std::make_unique<Daemon>();
  std::vector<MHD_OptionItem> tls = {{MHD_OPTION_END, 0, nullptr}};
  if (is_https) {  // The library parses both while it starts and does not read them again.
    tls = {{MHD_OPTION_HTTPS_MEM_CERT, 0, const_cast<char*>(certificate.cert_pem.c_str())},
           {MHD_OPTION_HTTPS_MEM_KEY, 0, const_cast<char*>(certificate.key_pem.c_str())},
           {MHD_OPTION_HTTPS_PRIORITIES, 0, const_cast<char*>(kTlsPriorities)},
           {MHD_OPTION_END, 0, nullptr}};
  }
  errno = 0;
  daemon->handle = MHD_start_daemon(
      MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET | MHD_ALLOW_SUSPEND_RESUME |
          (is_https ? MHD_USE_TLS : MHD_NO_FLAG),
      0, nullptr, nullptr, answer, this, MHD_OPTION_CONNECTION_MEMORY_LIMIT, kRequestBytesMax,
      MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned int>(kConnectionsMax),
      MHD_OPTION_NOTIFY_CONNECTION, notify, this, MHD_OPTION_UNESCAPE_CALLBACK, &KeepEscapes,
      nullptr, MHD_OPTION_ARRAY, tls.data(), MHD_OPTION_END);
  if (daemon->handle != nullptr) return daemon;
  if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || !is_https) {
    return absl::ResourceExhaustedError(
        absl::StrCat("--http: cannot start the server: ", std::strerror(errno)));
  }
  return absl::InvalidArgumentError("--http: TLS cannot use the certificate and its key");
}

absl::Status HttpServer::Impl::SetCertificate(const Certificate& certificate) {
  if (!is_https) return absl::OkStatus();
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<Daemon> daemon, StartDaemon(certificate));
  const absl::MutexLock lock(&mutex);
  std::swap(next_daemon, daemon);  // one that has no connections yet is replaced
  return absl::OkStatus();
}

HttpServer::Impl::~Impl() {
  {
    const absl::MutexLock lock(&mutex);
    is_stopping = true;
  }
  Wake();
  if (thread.joinable()) thread.join();
  for (Exchange& exchange : exchanges) {
    Drop(exchange);  // the library must not be stopped while connections are suspended
  }
  daemons.clear();
  for (std::thread& page_thread : page_threads) page_thread.join();
}

void HttpServer::Impl::Run() {
  bool is_out_of_files = false;
  while (true) {
    Poll(is_out_of_files);
    if (const absl::MutexLock lock(&mutex); is_stopping) return;
    is_out_of_files = false;
    for (const FileDescriptor& listener : listening.sockets) {
      is_out_of_files = !Accept(listener.get()) || is_out_of_files;
    }
    const absl::Time now = clock.Now();
    for (Exchange& exchange : exchanges) {
      if (exchange.deadline <= now) Drop(exchange);
    }
    for (const std::unique_ptr<Daemon>& daemon : daemons) MHD_run(daemon->handle);
    std::erase_if(daemons, [this, newest = daemons.back().get()](const auto& daemon) {
      return daemon.get() != newest && absl::c_none_of(exchanges, [&](const Exchange& each) {
               return each.daemon == daemon->handle;
             });
    });
  }
}

/// Waits until a descriptor is ready or the first deadline has passed.
void HttpServer::Impl::Poll(bool is_out_of_files) {
  std::vector<pollfd> polled = {{.fd = wake.get(), .events = POLLIN, .revents = 0}};
  for (const std::unique_ptr<Daemon>& daemon : daemons) {
    const int epoll = MHD_get_daemon_info(daemon->handle, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
    polled.push_back({.fd = epoll, .events = POLLIN, .revents = 0});
  }
  // While no file descriptor is left, the listeners stay readable, so they are not polled.
  for (const FileDescriptor& listener : listening.sockets) {
    if (!is_out_of_files) polled.push_back({.fd = listener.get(), .events = POLLIN, .revents = 0});
  }
  poll(polled.data(), polled.size(), PollMilliseconds(is_out_of_files));
  uint64_t unused = 0;
  (void)!read(wake.get(), &unused, sizeof(unused));
}

int HttpServer::Impl::PollMilliseconds(bool is_out_of_files) {
  MHD_UNSIGNED_LONG_LONG unused = 0;
  for (const std::unique_ptr<Daemon>& daemon : daemons) {
    if (MHD_get_timeout(daemon->handle, &unused) == MHD_YES) {
      return 0;  // The library has received data that it has not processed yet.
    }
  }
  // The oldest connection has the first deadline.
  const absl::Duration left =
      exchanges.empty() ? absl::InfiniteDuration() : exchanges.front().deadline - clock.Now();
  if (left == absl::InfiniteDuration()) return is_out_of_files ? kOutOfFilesPauseMs : -1;
  const int left_ms = static_cast<int>(absl::ToInt64Milliseconds(
      absl::Ceil(std::max(left, absl::ZeroDuration()), absl::Milliseconds(1))));
  return is_out_of_files ? std::min(left_ms, kOutOfFilesPauseMs) : left_ms;
}

bool HttpServer::Impl::Accept(int listener) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  const int socket = accept4(listener, reinterpret_cast<sockaddr*>(&address), &length,
                             SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (socket < 0) return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
  if (const absl::MutexLock lock(&mutex); next_daemon != nullptr) {
    daemons.push_back(std::move(next_daemon));
  }
  const auto is_of_address = [key = PeerNetworkOf(address)](const Exchange& exchange) {
    return exchange.address == key;
  };
  const bool is_address_full = std::count_if(exchanges.begin(), exchanges.end(), is_of_address) >=
                               static_cast<std::ptrdiff_t>(kAddressConnectionsMax);
  if (is_address_full || exchanges.size() >= kConnectionsMax) {
    Exchange& oldest = is_address_full
                           ? *std::find_if(exchanges.begin(), exchanges.end(), is_of_address)
                           : exchanges.front();
    MHD_Daemon* const daemon = oldest.daemon;
    Drop(oldest);
    MHD_run(daemon);  // closes it
  }
  // In case of an error the library closes the socket.
  MHD_add_connection(daemons.back()->handle, socket, reinterpret_cast<const sockaddr*>(&address),
                     length);
  return true;
}

void HttpServer::Impl::Drop(Exchange& exchange) {
  shutdown(exchange.socket, SHUT_RDWR);
  if (exchange.page != nullptr) {
    const absl::MutexLock lock(&mutex);
    std::erase(pages, exchange.page);
    Resume(*exchange.page);
  }
}

void HttpServer::Impl::Notify(MHD_Connection* connection, void** context,
                              MHD_ConnectionNotificationCode code) {
  if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
    exchanges.remove_if([closed = *context](const Exchange& each) { return &each == closed; });
    return;
  }
  const int socket =
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  getpeername(socket, reinterpret_cast<sockaddr*>(&address), &length);
  MHD_Daemon* const daemon =
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_DAEMON)->daemon;
  Exchange& exchange = exchanges.emplace_back(Exchange{.daemon = daemon,
                                                       .socket = socket,
                                                       .address = PeerNetworkOf(address),
                                                       .deadline = clock.Now() + kExchangeTimeout});
  *context = &exchange;
  if (is_https) {
    auto* const session = static_cast<gnutls_session_t>(
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_GNUTLS_SESSION)->tls_session);
    void* send_to = nullptr;
    void* unused = nullptr;
    gnutls_transport_get_ptr2(session, &unused, &send_to);
    gnutls_transport_set_ptr2(session, &exchange, send_to);
    gnutls_transport_set_pull_function(session, &ReceiveTls);
  }
}

MHD_Result HttpServer::Impl::Answer(MHD_Connection* connection, absl::string_view path,
                                    absl::string_view method) {
  Exchange& exchange = *static_cast<Exchange*>(
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context);
  if (exchange.page != nullptr) {  // The connection has been resumed.
    const absl::MutexLock lock(&mutex);
    return exchange.page->reply.has_value() ? Send(connection, *exchange.page->reply) : MHD_NO;
  }
  if (method != MHD_HTTP_METHOD_GET && method != MHD_HTTP_METHOD_HEAD) {
    return Send(connection, {.status = MHD_HTTP_METHOD_NOT_ALLOWED,
                             .body = "Only GET and HEAD are served here.\n",
                             .more_headers = {{MHD_HTTP_HEADER_ALLOW, "GET, HEAD"}}});
  }
  if (path == "/healthz") return Send(connection, {.body = "ok\n"});
  if (path == "/readyz") {
    const std::string reason = options.not_ready_reason ? options.not_ready_reason() : "";
    const std::string ready = options.ready_text ? options.ready_text() : "ready";
    return Send(connection, {.status = reason.empty() ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE,
                             .body = absl::StrCat(reason.empty() ? ready : reason, "\n")});
  }
  return SendPage(connection, exchange, path);
}

/// Suspends the connection until a page thread has computed the reply.
MHD_Result HttpServer::Impl::SendPage(MHD_Connection* connection, Exchange& exchange,
                                      absl::string_view path) {
  std::function<HttpReply()> compute = [] {
    return HttpReply{.status = MHD_HTTP_NOT_FOUND,
                     .body = "Not found. See /metrics, /healthz, /readyz and /.\n"};
  };
  if (path == "/metrics") {
    compute = [this] {
      return HttpReply{.body = metrics.Serialize(), .content_type = kMetricsText};
    };
  } else if (path == "/") {
    compute = [this, wants_html = WantsHtml(connection), refresh = RefreshOf(connection)] {
      return StatusReply(wants_html, refresh);
    };
  }
  if (options.check_access) {
    compute = [this, compute = std::move(compute), path = std::string(path),
               authorization = AuthorizationOf(connection), peer = PeerOf(connection)] {
      const absl::Status access = options.check_access(path, authorization, peer);
      return access.ok() ? compute() : RefusalOf(access);
    };
  }
  exchange.page =
      std::make_shared<Page>(Page{.compute = std::move(compute), .waiting = connection});
  MHD_suspend_connection(connection);
  const absl::MutexLock lock(&mutex);
  pages.push_back(exchange.page);
  return MHD_YES;
}

void HttpServer::Impl::ComputePages() {
  while (true) {
    std::shared_ptr<Page> page;
    {
      const absl::MutexLock lock(&mutex);
      mutex.Await(absl::Condition(this, &Impl::HasWork));
      if (is_stopping) return;
      page = std::move(pages.front());
      pages.pop_front();
    }
    HttpReply reply = page->compute();
    const absl::MutexLock lock(&mutex);
    page->reply = std::move(reply);
    Resume(*page);
  }
}

HttpReply HttpServer::Impl::StatusReply(bool wants_html, int refresh_seconds) const {
  HttpReply reply{.more_headers = {{MHD_HTTP_HEADER_VARY, "Accept"},
                                   {MHD_HTTP_HEADER_CACHE_CONTROL, "no-store"}}};
  if (!options.status_page || !wants_html) {
    reply.body = absl::StrCat(options.status_text ? options.status_text() : "",
                              options.status_page ? RenderLatencyText(options.status_page()) : "",
                              "\nSee /metrics, /healthz and /readyz.\n");
    return reply;
  }
  reply.body = RenderStatusPage(options.status_page(), refresh_seconds);
  reply.content_type = kHtml;
  reply.more_headers.emplace_back("Content-Security-Policy", kContentPolicy);
  reply.more_headers.emplace_back("X-Content-Type-Options", "nosniff");
  return reply;
}

void HttpServer::Impl::Resume(Page& page) {
  if (page.waiting != nullptr) {
    MHD_resume_connection(std::exchange(page.waiting, nullptr));
    Wake();
  }
}

void HttpServer::Impl::Wake() {
  const uint64_t one = 1;
  (void)!write(wake.get(), &one, sizeof(one));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HttpServer::~HttpServer() = default;

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Create(Options options,
                                                               const Metrics& metrics,
                                                               const Clock& clock) {
  LOGPROBD_ASSIGN_OR_RETURN(const ListenAddress address,
                            ParseHttpAddress("--http", options.listen));
  LOGPROBD_RETURN_IF_ERROR(CheckReachable(
      "--http", address,
      {.has_tls = address.is_https, .has_tokens = options.check_access != nullptr, .is_http = true},
      options.insecure));
  const Certificate certificate = std::exchange(options.certificate, {});
  auto impl = std::make_unique<Impl>(std::move(options), metrics, clock);
  LOGPROBD_RETURN_IF_ERROR(impl->Start(address, certificate));
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

absl::Status HttpServer::SetCertificate(const Certificate& certificate) {
  return impl_->SetCertificate(certificate);
}

int HttpServer::port() const { return impl_->listening.port; }

}  // namespace logprobd
