#include "server/transport/grpc_server.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <limits>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "grpc/compression.h"
#include "grpc/grpc.h"
#include "grpc/support/log.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/impl/server_builder_option.h"
#include "grpcpp/impl/server_builder_plugin.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "server/base/errors.h"
#include "server/base/log.h"
#include "server/transport/connection_acceptor.h"
#include "server/transport/same_host_access.h"
#include "server/transport/scoring_service.h"
#include "server/transport/sockets.h"
#include "server/transport/weights_service.h"

namespace logprobd {
namespace {

constexpr char kServiceName[] = "logprobd.v1.Scoring";
constexpr int64_t kMessageBytesMaxLimit = std::numeric_limits<int32_t>::max();

// A connection without traffic is asked after a minute whether its peer is still there, so that a
// host that vanished does not hold its requests.
constexpr int kKeepaliveMs = 60'000;
constexpr int kClientPingIntervalMinMs = 20'000;
/// A connection that has not said so much as HTTP/2's preface by then is closed.
constexpr int kHandshakeMs = 10'000;
/// What a client may send of a request before it hears from us. With HTTP/2's 64 KiB a small
/// request of a few rows stands still in its middle until a window update has come back.
constexpr int kLookaheadBytes = 1 << 20;

/// gRPC's reflection plug-in joins every server of a process that links it; this takes it out of
/// those that should not have it.
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

/// What of gRPC is set for the process, once: health for every server, reflection available, and
/// its own log lines at our debug level, since clients can cause them at will.
void PrepareGrpc() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    gpr_set_log_function([](gpr_log_func_args* line) {
      LogDebug("grpc", {{"text", line->message}, {"file", line->file}, {"line", line->line}});
    });
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
                                                   ", must hold two messages, at least ",
                                                   2 * options.message_bytes_max));
  }
  if (options.streams_max < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("streams_max: ", options.streams_max, ", must be at least 1"));
  }
  if (options.answer_bytes_max < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("answer_bytes_max: ", options.answer_bytes_max, ", must be at least 1"));
  }
  if (!(options.answer_client_share > 0 && options.answer_client_share <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("answer_client_share: ", options.answer_client_share, ", must be in (0, 1]"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ListenAddress> CheckedAddress(absl::string_view flag, const std::string& text,
                                             bool insecure) {
  LOGPROBD_ASSIGN_OR_RETURN(ListenAddress address, ParseListenAddress(flag, text));
  LOGPROBD_RETURN_IF_ERROR(CheckPublic(flag, address, insecure));
  return address;
}

void Configure(const GrpcServer::Options& options, grpc::ServerBuilder& builder) {
  // Without it a second server could take the same port and half of the connections.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.streams_max);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kClientPingIntervalMinMs);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.message_bytes_max));
  // Decompression is not charged to the quota: a small message could inflate to gigabytes.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  // The message limit alone does not bound memory: what is over it is received before it is
  // refused.
  grpc::ResourceQuota quota("logprobd");
  quota.Resize(static_cast<size_t>(options.receive_bytes_max));
  builder.SetResourceQuota(quota);
  builder.SetOption(std::make_unique<ReflectionOption>(options.reflection));
}

/// A gRPC server whose TCP connections come from an acceptor of ours. The acceptor ends first: what
/// it hands over after the server's end is closed.
struct Listener {
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> handler;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<ConnectionAcceptor> acceptor;

  /// Builds the server and takes connections. UNAVAILABLE when gRPC does not start.
  absl::Status Start(grpc::ServerBuilder& builder) {
    handler = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        grpc::InsecureServerCredentials());
    server = builder.BuildAndStart();
    if (server == nullptr) {
      return absl::UnavailableError("gRPC does not start");
    }
    return acceptor->Start([this](int socket) {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.fd = socket;
      handler->HandleNewConnection(&connection);
    });
  }

  void Shutdown(std::chrono::system_clock::time_point deadline) {
    if (acceptor != nullptr) {
      acceptor->Stop();
    }
    if (server != nullptr) {
      server->Shutdown(deadline);
    }
  }
};

/// Null where there is to be none, or where it cannot be had and need not.
absl::StatusOr<std::unique_ptr<SameHostAccess>> OpenLocal(const GrpcServer::Options& options,
                                                          Metrics& metrics) {
  if (options.local.empty()) {
    return nullptr;
  }
  std::error_code error;
  const std::string path = std::filesystem::absolute(options.local, error).string();
  absl::Status status = CheckSocketPath("--local", path);
  if (status.ok()) {
    absl::StatusOr<std::unique_ptr<SameHostAccess>> local =
        SameHostAccess::Create({.grpc_path = path,
                                .regions = options.shared_memory,
                                .pinning = options.pinning,
                                .devices = options.devices},
                               metrics);
    if (local.ok()) {
      return local;
    }
    status = local.status();
  }
  if (!options.unix_socket_is_optional) {
    return status;
  }
  LogInfo("no local socket", {{"reason", status.message()}});
  return nullptr;
}

ServerInfo FactsOf(const GrpcServer::Options& options, const SameHostAccess* local) {
  ServerInfo facts{options.version, {"tcp"}};
  if (local != nullptr) {
    facts.local = local->facts();
    facts.transports.emplace_back("unix");
    if (facts.local->shared_memory) {
      facts.transports.emplace_back("shm");
    }
    if (facts.local->cuda_ipc) {
      facts.transports.emplace_back("cuda_ipc");
    }
  }
  return facts;
}

void SetHealth(grpc::Server* server, bool serving) {
  if (server != nullptr) {
    grpc::HealthCheckServiceInterface* health = server->GetHealthCheckService();
    health->SetServingStatus("", serving);
    health->SetServingStatus(kServiceName, serving);
  }
}

}  // namespace

struct GrpcServer::Impl {
  Impl(const HeadRegistry& heads, ServerInfo facts, const AnswerBudget::Options& answers,
       std::unique_ptr<SameHostAccess> local_access, Metrics& metrics, const Clock& clock)
      : local(std::move(local_access)),
        service(heads, std::move(facts), answers, local.get(), metrics, clock),
        clock(clock) {}

  const std::unique_ptr<SameHostAccess> local;  // null: none
  ScoringService service;
  std::unique_ptr<WeightsService> weights;
  const Clock& clock;
  /// Answers UNIMPLEMENTED: health and reflection come from gRPC, but a server without a service of
  /// its own does not start.
  grpc::CallbackGenericService admin_methods;
  Listener data;
  Listener admin;
  std::once_flag shutdown_once;
};

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

GrpcServer::~GrpcServer() {
  Shutdown(absl::ZeroDuration());
  if (impl_->weights != nullptr) {
    impl_->weights->work().AwaitNone(impl_->clock, absl::InfiniteFuture());
  }
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Create(const Options& options,
                                                               const HeadRegistry& heads,
                                                               Metrics& metrics, const Clock& clock,
                                                               WeightStore* weights) {
  LOGPROBD_RETURN_IF_ERROR(CheckOptions(options));
  LOGPROBD_ASSIGN_OR_RETURN(const ListenAddress listen,
                            CheckedAddress("--listen", options.listen, options.insecure));
  PrepareGrpc();

  LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<SameHostAccess> local, OpenLocal(options, metrics));
  const std::string local_path = local == nullptr ? "" : local->facts().grpc_path;
  const AnswerBudget::Options answers{.bytes_max = options.answer_bytes_max,
                                      .client_share_max = options.answer_client_share};
  auto impl = std::make_unique<Impl>(heads, FactsOf(options, local.get()), answers,
                                     std::move(local), metrics, clock);

  LOGPROBD_ASSIGN_OR_RETURN(impl->data.acceptor,
                            ConnectionAcceptor::Listen({.flag = "--listen", .address = listen}));
  grpc::ServerBuilder builder;
  Configure(options, builder);
  builder.RegisterService(&impl->service);
  int local_bound = 1;
  if (!local_path.empty()) {
    builder.AddListeningPort(absl::StrCat("unix:", local_path), grpc::InsecureServerCredentials(),
                             &local_bound);
  }
  const absl::Status started = impl->data.Start(builder);
  if (!started.ok() && local_bound == 0) {
    return absl::UnavailableError(absl::StrCat("--local: cannot listen on ", local_path));
  }
  LOGPROBD_RETURN_IF_ERROR(WithContext(started, "--listen"));
  SetHealth(impl->data.server.get(), false);

  if (!options.admin.empty()) {
    LOGPROBD_ASSIGN_OR_RETURN(const ListenAddress address,
                              CheckedAddress("--admin", options.admin, options.insecure));
    LOGPROBD_ASSIGN_OR_RETURN(impl->admin.acceptor,
                              ConnectionAcceptor::Listen({.flag = "--admin", .address = address}));
    grpc::ServerBuilder admin_builder;
    Configure(options, admin_builder);
    admin_builder.RegisterCallbackGenericService(&impl->admin_methods);
    if (weights != nullptr) {
      impl->weights = std::make_unique<WeightsService>(*weights);
      admin_builder.RegisterService(impl->weights.get());
    }
    LOGPROBD_RETURN_IF_ERROR(WithContext(impl->admin.Start(admin_builder), "--admin"));
    SetHealth(impl->admin.server.get(), false);
  }
  return std::unique_ptr<GrpcServer>(new GrpcServer(std::move(impl)));
}

int GrpcServer::port() const { return impl_->data.acceptor->port(); }

int GrpcServer::admin_port() const {
  return impl_->admin.acceptor == nullptr ? 0 : impl_->admin.acceptor->port();
}

std::string GrpcServer::unix_socket_path() const {
  return impl_->local == nullptr ? "" : impl_->local->facts().grpc_path;
}

void GrpcServer::SetServing(bool serving) {
  SetHealth(impl_->data.server.get(), serving);
  SetHealth(impl_->admin.server.get(), serving);
}

void GrpcServer::SetAnswerLimits(int64_t bytes_max, double client_share) {
  impl_->service.handler().SetAnswerLimits(
      {.bytes_max = bytes_max, .client_share_max = client_share});
}

void GrpcServer::Shutdown(absl::Duration grace) {
  std::call_once(impl_->shutdown_once, [this, grace] {
    SetServing(false);
    ScoreHandler& handler = impl_->service.handler();
    handler.RefuseNew();
    // Not gRPC's own grace: it would also wait for idle streams and for watchers of the health
    // service, which never end by themselves.
    const absl::Time until = impl_->clock.Now() + grace;
    handler.work().AwaitNone(impl_->clock, until);
    if (impl_->weights != nullptr) {
      impl_->weights->RefuseNew();
      impl_->weights->work().AwaitNone(impl_->clock, until);
    }
    const auto now = std::chrono::system_clock::now();
    impl_->data.Shutdown(now);
    impl_->admin.Shutdown(now);
    if (impl_->local != nullptr) {
      impl_->local->Stop();
    }
  });
}

}  // namespace logprobd
