#include "server/transport/grpc_versions.h"

#include "grpcpp/version_info.h"
#include "server/base/log.h"

// gRPC writes its lines with Abseil's log from 1.66 on, and has no log of its own in later
// versions. Debian's Abseil has no log yet, so its headers cannot be included unconditionally.
#define LOGPROBD_GRPC_LOGS_WITH_ABSEIL (GRPC_CPP_VERSION_MAJOR > 1 || GRPC_CPP_VERSION_MINOR >= 66)

#if LOGPROBD_GRPC_LOGS_WITH_ABSEIL
#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/log/initialize.h"
#include "absl/log/log_entry.h"
#include "absl/log/log_sink.h"
#include "absl/log/log_sink_registry.h"
#else
#include "grpc/support/log.h"
#endif

namespace logprobd {
namespace {

/// A template, so that only the branch that `Options` has is compiled.
template <typename Options>
Options OptionsOf(const std::shared_ptr<grpc::experimental::CertificateProviderInterface>& provider,
                  bool needs_client) {
  if constexpr (requires { Options::Create(provider); }) {
    Options options = Options::Create(provider).value();  // It fails only without a provider.
    if (needs_client) options.set_root_certificate_provider(provider);
    return options;
  } else {
    Options options(provider);
    options.watch_identity_key_cert_pairs();
    if (needs_client) options.watch_root_certs();
    return options;
  }
}

}  // namespace

#if LOGPROBD_GRPC_LOGS_WITH_ABSEIL
void LogGrpcAtDebugLevel() {
  struct Sink final : absl::LogSink {
    void Send(const absl::LogEntry& entry) override {
      LogDebug("grpc", {{"text", entry.text_message()},
                        {"file", entry.source_filename()},
                        {"line", entry.source_line()}});
    }
  };
  absl::AddLogSink(new Sink);  // It is never deleted, because gRPC logs until the process ends.
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kFatal);
  absl::InitializeLog();
}
#else
void LogGrpcAtDebugLevel() {
  gpr_set_log_function([](gpr_log_func_args* line) {
    LogDebug("grpc", {{"text", line->message}, {"file", line->file}, {"line", line->line}});
  });
}
#endif

grpc::experimental::TlsServerCredentialsOptions TlsOptionsOf(
    const std::shared_ptr<grpc::experimental::CertificateProviderInterface>& provider,
    bool needs_client) {
  return OptionsOf<grpc::experimental::TlsServerCredentialsOptions>(provider, needs_client);
}

}  // namespace logprobd
