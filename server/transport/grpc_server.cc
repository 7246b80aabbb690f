#include "server/transport/grpc_server.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "grpc/compression.h"
#include "grpc/grpc.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/impl/server_builder_option.h"
#include "grpcpp/impl/server_builder_plugin.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_certificate_verifier.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/base/log_writer.h"
#include "server/base/text.h"
#include "server/transport/access_processor.h"
#include "server/transport/connection_acceptor.h"
#include "server/transport/grpc_versions.h"
#include "server/transport/health_service.h"
#include "server/transport/revocation_lists.h"
#include "server/transport/same_host_access.h"
#include "server/transport/scoring_service.h"
#include "server/transport/sockets.h"
#include "server/transport/weights_service.h"

namespace logprobd {
namespace {

constexpr int64_t kMessageBytesMaxLimit = std::numeric_limits<int32_t>::max();

// After a minute without traffic the server pings the peer, so that the requests of a host that
// vanished end.
constexpr int kKeepaliveMs = 60'000;
/// Shortest interval of a client's pings, with and without calls. The shortest keepalive time of
/// gRPC for Go and Java is 10 s, and a ping may arrive early if the one before was delayed. gRPC
/// ends a connection with "too_many_pings" at the third ping that comes earlier and follows no data
/// of ours.
constexpr int kClientPingIntervalMinMs = 5'000;
/// Time for a connection to send the HTTP/2 preface before the server closes it.
constexpr int kHandshakeMs = 10'000;
/// Time for a client to acknowledge the server's SETTINGS before its connection is closed. The
/// limit on the size of headers holds only from then on. gRPC 1.51 has no such limit and ignores
/// it.
constexpr int kSettingsMs = 5'000;
constexpr char kSettingsTimeoutArgument[] = "grpc.http2.settings_timeout";
/// Number of file descriptors that connections to --listen may not use, and those to --admin. The
/// difference is left to operators, whatever the clients do.
constexpr int kFilesReservedFromData = 96;
constexpr int kFilesReservedFromAdmin = 64;
/// Number of bytes of a request that a client may send before the first window update. With
/// HTTP/2's default of 64 KiB a request of a few rows would stall until a window update arrives.
constexpr int kLookaheadBytes = 1 << 20;

/// Removes gRPC's reflection plug-in from servers that must not have it. gRPC adds the plug-in to
/// every server of a process that links it.
class ReflectionOption final : public grpc::ServerBuilderOption {
 public:
  explicit ReflectionOption(bool enabled) : enabled_(enabled) {}
  void UpdateArguments(grpc::ChannelArguments* /*arguments*/) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    if (!enabled_) {
      plugins->erase(std::remove_if(plugins->begin(), plugins->end(),
                                    [](const std::unique_ptr<grpc::ServerBuilderPlugin>& plugin) {
                                      return plugin->name() == "proto_server_reflection";
                                    }),
                     plugins->end());
    }
  }

 private:
  bool enabled_;
};

/// Applies the process-wide settings of gRPC once: makes reflection available, and logs gRPC's
/// lines at the debug level, because clients can cause any number of them.
void PrepareGrpc() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    LogGrpcAtDebugLevel();
  });
}

absl::Status CheckOptions(const GrpcServer::Options& options) {
  if (options.message_bytes_max < 1 || options.message_bytes_max > kMessageBytesMaxLimit) {
    return absl::InvalidArgumentError(absl::StrCat("message_bytes_max: ", options.message_bytes_max,
                                                   ", must be in [1, ", kMessageBytesMaxLimit,
                                                   "]"));
  }
  if (options.receive_bytes_max < 2 * options.message_bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat("receive_bytes_max: ", options.receive_bytes_max,
                                                   ", must have room for two messages, at least ",
                                                   2 * options.message_bytes_max));
  }
  if (options.streams_max < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("streams_max: ", options.streams_max, ", must be at least 1"));
  }
  if (options.answers.bytes_max < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("answers.bytes_max: ", options.answers.bytes_max, ", must be at least 1"));
  }
  if (!(options.answers.client_share_max > 0 && options.answers.client_share_max <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "answers.client_share_max: ", options.answers.client_share_max, ", must be in (0, 1]"));
  }
  return absl::OkStatus();
}

ListenerSecurity SecurityOf(const GrpcServer::Options& options) {
  const TlsFiles* const tls = options.tls;
  return {.has_tls = tls != nullptr,
          .has_client_certificates = tls != nullptr && tls->options().needs_client_certificates(),
          .has_tokens = options.access != nullptr};
}

/// Returns the address of the admin listener.
absl::StatusOr<ListenAddress> CheckedAdminAddress(const GrpcServer::Options& options) {
  LOGPROBD_ASSIGN_OR_RETURN(ListenAddress address,
                            ParseListenAddressOrPath("--admin", options.admin));
  ListenerSecurity security = SecurityOf(options);
  security.changes_weights = true;
  LOGPROBD_RETURN_IF_ERROR(CheckReachable("--admin", address, security, options.insecure));
  return address;
}

/// Interval at which gRPC looks at the copies of the TLS files, its shortest.
constexpr unsigned kTlsWatchSeconds = 1;

/// Refuses revoked certificates of clients after the handshake, before HTTP/2.
class RevocationVerifier final : public grpc::experimental::ExternalCertificateVerifier {
 public:
  explicit RevocationVerifier(std::shared_ptr<RevocationCheck> check) : check_(std::move(check)) {}

  bool Verify(grpc::experimental::TlsCustomVerificationCheckRequest* request,
              std::function<void(grpc::Status)> /*callback*/, grpc::Status* status) override {
    const absl::Status checked =
        check_->Check(ViewOf(request->peer_cert()), ViewOf(request->peer_cert_full_chain()));
    *status = checked.ok() ? grpc::Status::OK
                           : grpc::Status(grpc::StatusCode::PERMISSION_DENIED,
                                          std::string(checked.message()));
    return true;  // Nothing is left to be done.
  }
  void Cancel(grpc::experimental::TlsCustomVerificationCheckRequest* /*request*/) override {}

 private:
  static absl::string_view ViewOf(const grpc::string_ref& text) {
    return {text.data(), text.size()};
  }

  const std::shared_ptr<RevocationCheck> check_;
};

/// gRPC's lowest version is TLS 1.2, and it prefers 1.3.
std::shared_ptr<grpc::ServerCredentials> TlsCredentialsOf(const TlsFiles& tls) {
  const bool needs_client = tls.options().needs_client_certificates();
  grpc::experimental::TlsServerCredentialsOptions options =
      TlsOptionsOf(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
                       tls.pair_path(), tls.pair_path(), needs_client ? tls.client_ca_path() : "",
                       kTlsWatchSeconds),
                   needs_client);
  if (needs_client) {
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  if (tls.revocation() != nullptr) {
    // gRPC's own lists (set_crl_directory) would ignore one that is damaged, check no session that
    // is resumed, say nothing about refusals, and trust CAs whose certificates lie in the folder.
    options.set_certificate_verifier(
        grpc::experimental::ExternalCertificateVerifier::Create<RevocationVerifier>(
            tls.revocation()));
  }
  return grpc::experimental::TlsServerCredentials(options);
}

/// Returns the credentials of a listener without TLS. With tokens they are gRPC's local
/// credentials, since insecure ones call no AccessProcessor; they send nothing themselves, so
/// clients connect as usual.
std::shared_ptr<grpc::ServerCredentials> PlainCredentialsOf(
    const std::shared_ptr<AccessProcessor>& processor, grpc_local_connect_type type) {
  return processor == nullptr ? grpc::InsecureServerCredentials()
                              : grpc::experimental::LocalServerCredentials(type);
}

/// Makes `processor`, unless it is null, check the calls of a listener.
std::shared_ptr<grpc::ServerCredentials> WithAccess(
    std::shared_ptr<grpc::ServerCredentials> credentials,
    const std::shared_ptr<AccessProcessor>& processor) {
  if (processor != nullptr) credentials->SetAuthMetadataProcessor(processor);
  return credentials;
}

void Configure(const GrpcServer::Options& options, grpc::ServerBuilder& builder) {
  // With port reuse a second server could take the same port and half of the connections.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.streams_max);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kClientPingIntervalMinMs);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(kSettingsTimeoutArgument, kSettingsMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, options.connection_idle_ms_max);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, options.connection_age_ms_max);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.message_bytes_max));
  // Decompression does not count against the quota, and a small message could inflate to gigabytes.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  // The message limit alone does not bound memory, because gRPC receives a message that is too
  // large before it refuses it.
  grpc::ResourceQuota quota("logprobd");
  quota.Resize(static_cast<size_t>(options.receive_bytes_max));
  builder.SetResourceQuota(quota);
  builder.SetOption(std::make_unique<ReflectionOption>(options.reflection));
}

/// A gRPC server that gets its connections from ConnectionAcceptors. They stop first, because the
/// server would close later connections.
struct Listener {
  std::unique_ptr<grpc::CallbackGenericService> health;
  std::vector<std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor>> handlers;
  std::unique_ptr<grpc::Server> server;
  std::vector<std::unique_ptr<ConnectionAcceptor>> acceptors;

  /// Ends all calls. If another listener has failed to start, no one else does, and gRPC would wait
  /// for their end.
  ~Listener() { Shutdown(std::chrono::system_clock::now()); }

  /// Makes the server of `builder` take connections of `acceptor`.
  void Add(grpc::ServerBuilder& builder, std::unique_ptr<ConnectionAcceptor> acceptor,
           const std::shared_ptr<grpc::ServerCredentials>& credentials) {
    handlers.push_back(builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials));
    acceptors.push_back(std::move(acceptor));
  }

  /// Builds the server and starts to accept connections. Returns UNAVAILABLE if gRPC does not
  /// start.
  absl::Status Start(grpc::ServerBuilder& builder, HealthService& health_service) {
    health = health_service.NewMethods();
    builder.RegisterCallbackGenericService(health.get());
    server = builder.BuildAndStart();
    if (server == nullptr) return absl::UnavailableError("gRPC could not start the server");
    auto handler_of = handlers.begin();
    for (const std::unique_ptr<ConnectionAcceptor>& acceptor : acceptors) {
      LOGPROBD_RETURN_IF_ERROR(acceptor->Start([handler = (handler_of++)->get()](int socket) {
        grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
        connection.fd = socket;
        // Names a listener, nothing else; newer versions of gRPC refuse -1.
        connection.listener_fd = socket;
        handler->HandleNewConnection(&connection);
      }));
    }
    return absl::OkStatus();
  }

  void Shutdown(std::chrono::system_clock::time_point deadline) {
    for (const std::unique_ptr<ConnectionAcceptor>& acceptor : acceptors) acceptor->Stop();
    if (server != nullptr) server->Shutdown(deadline);
  }
};

/// Opens the Unix and control sockets. Returns null when the options name no socket, or when an
/// optional socket cannot be opened.
absl::StatusOr<std::unique_ptr<SameHostAccess>> OpenSameHostAccess(
    const GrpcServer::Options& options, Metrics& metrics) {
  if (options.unix_socket.empty()) return nullptr;
  std::error_code error;
  const std::string path = std::filesystem::absolute(options.unix_socket, error).string();
  absl::StatusOr<std::unique_ptr<SameHostAccess>> local =
      SameHostAccess::Create({.grpc_path = path,
                              .regions = options.shared_memory,
                              .pinning = options.pinning,
                              .devices = options.devices},
                             metrics);
  if (local.ok() || !options.unix_socket_is_optional) return local;
  LogInfo("the server has no Unix socket", {{"reason", local.status().message()}});
  return nullptr;
}

ServerInfo ServerInfoOf(const GrpcServer::Options& options, const SameHostAccess* local) {
  ServerInfo info{options.version, {"tcp"}};
  if (local != nullptr) {
    info.same_host = local->info();
    info.transports.emplace_back("unix");
    if (info.same_host->shared_memory) info.transports.emplace_back("shm");
    if (info.same_host->cuda_ipc) info.transports.emplace_back("cuda_ipc");
  }
  return info;
}

/// A watch outlives the age at which its connection is told to end, with the 10 % by which gRPC
/// varies it, so that clients that then leave notice no other limit.
HealthService::Options HealthOptionsOf(const GrpcServer::Options& options) {
  HealthService::Options health;
  health.watch_time_max = absl::Milliseconds(options.connection_age_ms_max) * 1.25;
  return health;
}

/// Logs the limits of peers without tokens that no setting changes.
void LogLimits(const HealthService::Options& health) {
  const bool has_settings_limit = GrpcVulnerabilities(GrpcVersion()).empty();
  LogInfo("limits", {{"health_calls", health.calls_max},
                     {"health_calls_of_an_address", health.peer_calls_max},
                     {"health_message_ms", absl::ToInt64Milliseconds(health.message_time_max)},
                     {"health_watch_s", absl::ToInt64Seconds(health.watch_time_max)},
                     {"handshake_ms", kHandshakeMs},
                     {"settings_ms", has_settings_limit ? absl::StrCat(kSettingsMs) : "none"},
                     {"log_queue", HumanBytes(static_cast<int64_t>(LogWriter::kQueueBytesMax))}});
}

}  // namespace

struct GrpcServer::Impl {
  Impl(const HeadRegistry& heads, ServerInfo info, const AnswerBudget::Options& answers,
       std::unique_ptr<SameHostAccess> local, std::shared_ptr<const AccessList> access_list,
       std::unique_ptr<HealthService> health_service, Metrics& metrics, const Clock& clock)
      : health(std::move(health_service)),
        same_host(std::move(local)),
        access(std::move(access_list)),
        service(heads, std::move(info), answers, same_host.get(), access.get(), metrics, clock),
        clock(clock) {}

  const std::unique_ptr<HealthService> health;
  const std::unique_ptr<SameHostAccess> same_host;  // null if there is no Unix socket
  const std::shared_ptr<const AccessList> access;   // null if callers need no tokens
  ScoringService service;
  std::unique_ptr<WeightsService> weights;
  const Clock& clock;
  Listener data;
  Listener admin;
  std::once_flag shutdown_once;
};

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

GrpcServer::~GrpcServer() {
  Shutdown(absl::ZeroDuration());
  impl_->admin.Shutdown(std::chrono::system_clock::now());  // cancels loads that still run
  if (impl_->weights != nullptr) impl_->weights->AwaitNone(impl_->clock, absl::InfiniteFuture());
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Create(const Options& options,
                                                               const HeadRegistry& heads,
                                                               Metrics& metrics, const Clock& clock,
                                                               WeightStore* weights) {
  LOGPROBD_RETURN_IF_ERROR(CheckOptions(options));
  LOGPROBD_ASSIGN_OR_RETURN(const ListenAddress listen,
                            ParseListenAddress("--listen", options.listen));
  LOGPROBD_RETURN_IF_ERROR(
      CheckReachable("--listen", listen, SecurityOf(options), options.insecure));
  PrepareGrpc();

  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<SameHostAccess> local,
                            OpenSameHostAccess(options, metrics));
  const std::string local_path = local == nullptr ? "" : local->info().grpc_path;
  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<HealthService> health,
                            HealthService::Create(HealthOptionsOf(options), clock));
  auto impl =
      std::make_unique<Impl>(heads, ServerInfoOf(options, local.get()), options.answers,
                             std::move(local), options.access, std::move(health), metrics, clock);
  const auto processor = options.access == nullptr
                             ? nullptr
                             : std::make_shared<AccessProcessor>(options.access, metrics);

  const std::shared_ptr<grpc::ServerCredentials> over_tcp =
      WithAccess(options.tls == nullptr ? PlainCredentialsOf(processor, LOCAL_TCP)
                                        : TlsCredentialsOf(*options.tls),
                 processor);
  const std::shared_ptr<grpc::ServerCredentials> over_unix =
      WithAccess(PlainCredentialsOf(processor, UDS), processor);

  LOGPROBD_ASSIGN_OR_RETURN(
      std::unique_ptr<ConnectionAcceptor> acceptor,
      ConnectionAcceptor::Listen(
          {.flag = "--listen", .address = listen, .files_reserved = kFilesReservedFromData}));
  grpc::ServerBuilder builder;
  Configure(options, builder);
  builder.RegisterService(&impl->service);
  impl->data.Add(builder, std::move(acceptor), over_tcp);
  if (!local_path.empty()) {
    ListenAddress address;
    address.unix_path = local_path;
    LOGPROBD_ASSIGN_OR_RETURN(acceptor,
                              ConnectionAcceptor::Listen({.flag = "--local",
                                                          .address = address,
                                                          .files_reserved = kFilesReservedFromData,
                                                          .has_path_lock = true,
                                                          .is_audited = false}));
    impl->data.Add(builder, std::move(acceptor), over_unix);
  }
  LOGPROBD_RETURN_IF_ERROR(WithContext(impl->data.Start(builder, *impl->health), "--listen"));

  if (!options.admin.empty()) {
    LOGPROBD_ASSIGN_OR_RETURN(const ListenAddress address, CheckedAdminAddress(options));
    LOGPROBD_ASSIGN_OR_RETURN(
        acceptor,
        ConnectionAcceptor::Listen(
            {.flag = "--admin", .address = address, .files_reserved = kFilesReservedFromAdmin}));
    grpc::ServerBuilder admin_builder;
    Configure(options, admin_builder);
    if (weights != nullptr) {
      impl->weights = std::make_unique<WeightsService>(
          *weights, impl->same_host.get(), impl->access.get(), options.audit_required, clock);
      admin_builder.RegisterService(impl->weights.get());
    }
    impl->admin.Add(admin_builder, std::move(acceptor),
                    address.unix_path.empty() ? over_tcp : over_unix);
    LOGPROBD_RETURN_IF_ERROR(
        WithContext(impl->admin.Start(admin_builder, *impl->health), "--admin"));
  }
  LogLimits(HealthOptionsOf(options));
  return std::unique_ptr<GrpcServer>(new GrpcServer(std::move(impl)));
}

int GrpcServer::port() const { return impl_->data.acceptors.front()->port(); }

std::string GrpcServer::admin_address() const {
  const auto& acceptors = impl_->admin.acceptors;
  return acceptors.empty() ? "" : acceptors.front()->address().ToString();
}

std::string GrpcServer::unix_socket_path() const {
  return impl_->same_host == nullptr ? "" : impl_->same_host->info().grpc_path;
}

void GrpcServer::SetServing(bool serving) { impl_->health->SetServing(serving); }

void GrpcServer::SetAnswerLimits(int64_t bytes_max, double client_share) {
  impl_->service.handler().SetAnswerLimits(
      {.bytes_max = bytes_max, .client_share_max = client_share});
}

int GrpcServer::CancelUnreadAnswers() { return impl_->service.handler().unread().CancelOld(); }

void GrpcServer::Shutdown(absl::Duration grace) {
  std::call_once(impl_->shutdown_once, [this, grace] {
    SetServing(false);
    ScoreHandler& handler = impl_->service.handler();
    handler.RefuseNew();
    // gRPC's own grace period would also wait for idle streams and for watchers of the health
    // service, which last longer.
    const absl::Time until = impl_->clock.Now() + grace;
    handler.work().AwaitNone(impl_->clock, until);
    bool is_loading = false;
    if (impl_->weights != nullptr) {
      impl_->weights->RefuseNew();
      is_loading = !impl_->weights->AwaitNone(impl_->clock, until);
    }
    const auto now = std::chrono::system_clock::now();
    impl_->data.Shutdown(now);
    if (!is_loading) {  // gRPC would wait for the load, which may hang in a read.
      impl_->admin.Shutdown(now);
    }
    if (impl_->same_host != nullptr) impl_->same_host->Stop();
  });
}

}  // namespace logprobd
