#include "server/transport/grpc_versions.h"

#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "grpcpp/grpcpp.h"
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
#include "google/protobuf/stubs/logging.h"
#include "grpc/support/log.h"
#endif

namespace logprobd {
namespace {

/// The first version that tests/soak/hostile_peers.py found without the holes of 1.51. Versions
/// between them have fixes, but were not tried.
constexpr int kSafeMajor = 1;
constexpr int kSafeMinor = 83;

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

std::string GrpcVersion() { return grpc::Version(); }

std::string GrpcVulnerabilities(absl::string_view version) {
  const std::vector<absl::string_view> numbers = absl::StrSplit(version, '.');
  int major = 0;
  int minor = 0;
  const bool is_known = numbers.size() >= 2 && absl::SimpleAtoi(numbers[0], &major) &&
                        absl::SimpleAtoi(numbers[1], &minor);
  if (is_known && (major > kSafeMajor || (major == kSafeMajor && minor >= kSafeMinor))) return "";
  return "headers without end take gigabytes of memory and seconds of CPU time (CVE-2023-33953), "
         "and so do calls that are reset at once (CVE-2023-44487)";
}

#if LOGPROBD_GRPC_LOGS_WITH_ABSEIL
void LogGrpcAtDebugLevel() {
  struct Sink final : absl::LogSink {
    void Send(const absl::LogEntry& entry) override {
      // The process ends after a fatal line.
      const bool is_fatal = entry.log_severity() == absl::LogSeverity::kFatal;
      Log(is_fatal ? LogLevel::kError : LogLevel::kDebug, "grpc",
          {{"text", entry.text_message()},
           {"file", entry.source_filename()},
           {"line", entry.source_line()}});
    }
  };
  absl::AddLogSink(new Sink);  // It is never deleted, because gRPC logs until the process ends.
  absl::SetStderrThreshold(absl::LogSeverityAtLeast::kInfinity);  // It would wait for a reader.
  absl::InitializeLog();
}
#else
void LogGrpcAtDebugLevel() {
  gpr_set_log_function([](gpr_log_func_args* line) {
    LogDebug("grpc", {{"text", line->message}, {"file", line->file}, {"line", line->line}});
  });
  // Its own handler writes to standard error for each name that is not UTF-8.
  google::protobuf::SetLogHandler([](google::protobuf::LogLevel /*level*/, const char* file,
                                     int line, const std::string& text) {
    LogDebug("protobuf", {{"text", text}, {"file", file}, {"line", line}});
  });
}
#endif

grpc::experimental::TlsServerCredentialsOptions TlsOptionsOf(
    const std::shared_ptr<grpc::experimental::CertificateProviderInterface>& provider,
    bool needs_client) {
  return OptionsOf<grpc::experimental::TlsServerCredentialsOptions>(provider, needs_client);
}

}  // namespace logprobd
