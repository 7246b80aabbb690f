#include "server/app/options/server_options.h"

#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>
#include <variant>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/app/options/flags.h"
#include "server/app/options/part_options.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"
#include "server/base/listen_address.h"
#include "server/base/log.h"
#include "server/base/text.h"
#include "server/batching/batcher.h"
#include "server/engine/engines.h"
#include "server/http/http_server.h"
#include "server/transport/grpc_server.h"
#include "server/transport/tls_files.h"
#include "server/weights/head_weights.h"

namespace logprobd {
namespace {

constexpr absl::string_view kModel = "model";
/// Maximum number of heads. Each has its own queue, threads and metric series, and more heads have
/// no known use.
constexpr size_t kHeadsMax = 64;
/// Maximum number of bytes of a value that an error message repeats.
constexpr size_t kTextBytesShown = 100;

std::vector<const HeadValue*> ValuesOf(const ServerOptions& options, absl::string_view flag) {
  std::vector<const HeadValue*> values;
  for (const HeadValue& value : options.head_values) {
    if (value.flag == flag) values.push_back(&value);
  }
  return values;
}

std::string NamesOf(const std::vector<ServerOptions>& heads) {
  return absl::StrJoin(heads, ", ", [](std::string* out, const ServerOptions& head) {
    absl::StrAppend(out, head.head_name);
  });
}

/// Checks the name of a head, which was given with `flag`.
absl::Status CheckName(absl::string_view flag, const std::string& name, size_t bytes_max) {
  if (name.empty() || name.size() > bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": a head's name has ", name.size(),
                                                   " bytes, but must have 1 to ", bytes_max));
  }
  if (!IsUtf8(name) || HasControlCharacters(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": a head's name must be UTF-8 without control characters"));
  }
  if (name == "unknown") {
    return absl::InvalidArgumentError(absl::StrCat(
        flag, ": the name \"unknown\" is reserved: the metrics count unknown heads under it"));
  }
  return absl::OkStatus();
}

absl::Status CheckNames(const ServerOptions& options, const std::vector<ServerOptions>& heads) {
  // A request cannot carry a longer name, and answers repeat the name as UTF-8.
  constexpr size_t kNameBytesMax = 256;
  // The metrics distinguish several heads by a label, which is truncated to this length.
  constexpr size_t kLabelBytesMax = 128;
  if (ValuesOf(options, kModel).empty()) {
    return CheckName("--head-name", options.head_name, kNameBytesMax);
  }
  if (!options.model.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--model has the folder ", options.model,
                                                   " without a name, but also the named heads ",
                                                   NamesOf(heads), ": write NAME=DIR for each"));
  }
  if (options.head_name != ServerOptions().head_name) {
    return absl::InvalidArgumentError(
        "--head-name cannot be combined with --model NAME=DIR, which already names the heads");
  }
  if (heads.size() > kHeadsMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--model names ", heads.size(), " heads, but at most ", kHeadsMax, " are allowed"));
  }
  for (const ServerOptions& head : heads) {
    LOGPROBD_RETURN_IF_ERROR(CheckName("--model", head.head_name, kLabelBytesMax));
    if (head.model.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--model has no folder for head \"", head.head_name, "\""));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckHeads(const ServerOptions& options) {
  const std::vector<ServerOptions> heads = HeadOptions(options);
  if (heads.front().model.empty() && ValuesOf(options, kModel).empty()) {
    return absl::InvalidArgumentError(
        "--model is missing: name a model folder (config.json and safetensors); see --help");
  }
  LOGPROBD_RETURN_IF_ERROR(CheckNames(options, heads));
  for (const HeadValue& value : options.head_values) {
    const auto has_name = [&value](const ServerOptions& head) {
      return head.head_name == value.head;
    };
    if (absl::c_none_of(heads, has_name)) {
      return absl::InvalidArgumentError(absl::StrCat("--", value.flag, " has a value for head \"",
                                                     value.head.substr(0, kTextBytesShown),
                                                     "\", but the heads are: ", NamesOf(heads)));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckReceiveBytes(const ServerOptions& options) {
  const std::string receive = absl::StrCat("--receive-bytes ", BytesText(options.receive_bytes));
  // One message is received while another waits for its rows to be copied.
  if (options.receive_bytes / 2 < options.max_message_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(receive,
                                                   " must be at least twice --max-message-bytes ",
                                                   BytesText(options.max_message_bytes)));
  }
  // Queued messages count towards --receive-bytes.
  if (options.receive_bytes <= options.queue_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        receive, " must be larger than --queue-bytes ", BytesText(options.queue_bytes),
        ": otherwise a full queue leaves no memory to receive, and refuse, a message"));
  }
  return absl::OkStatus();
}

/// Checks --gpus, --replicas and --shards for errors that do not depend on the GPUs of the machine.
/// Without this check, `--device auto` would later fall back to the CPU because of such an error.
absl::Status CheckLayout(const ServerOptions& options) {
  if (options.gpus.empty()) return absl::OkStatus();
  if (options.device == Device::kCpu) {
    return absl::InvalidArgumentError("--gpus contradicts --device cpu");
  }
  const auto given = static_cast<int64_t>(options.gpus.size());
  const int64_t asked =
      std::max<int64_t>(options.replicas, 1) * std::max<int64_t>(options.shards, 1);
  const bool is_fixed = options.replicas > 0 && options.shards > 0;
  if (given % asked != 0 || (is_fixed && given != asked)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--gpus names ", given, given == 1 ? " GPU" : " GPUs", ", but --replicas ",
                     FlagValueAsToml(*FindFlag("replicas"), options), " x --shards ",
                     FlagValueAsToml(*FindFlag("shards"), options), " cannot use ",
                     given == 1 ? "it" : "all of them"));
  }
  return absl::OkStatus();
}

absl::Status CheckCudaIpc(const ServerOptions& options) {
  if (options.cuda_ipc && options.device == Device::kCpu) {
    return absl::InvalidArgumentError(
        "--cuda-ipc reads GPU memory, which contradicts --device cpu");
  }
  if (options.cuda_ipc && options.local.empty()) {
    return absl::InvalidArgumentError(
        "--cuda-ipc needs the control socket, which --local none turns off");
  }
  return absl::OkStatus();
}

constexpr absl::string_view kListenerFlags[] = {"--listen", "--http", "--admin"};

/// Checks the address of --http. `insecure` replaces --insecure.
absl::Status CheckHttp(const ServerOptions& options, bool insecure) {
  LOGPROBD_ASSIGN_OR_RETURN(const ListenAddress address, ParseHttpAddress("--http", options.http));
  if (address.is_https && options.tls_cert.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--http: ", address.ToString(), " needs --tls-cert and --tls-key, too"));
  }
  return CheckReachable(
      "--http", address,
      {.has_tls = address.is_https, .has_tokens = !options.tokens.empty(), .is_http = true},
      insecure);
}

/// Returns the address of a gRPC listener, which must not be empty or kAutoPath.
absl::StatusOr<ListenAddress> GrpcAddressOf(absl::string_view flag, const ServerOptions& options) {
  return flag == "--admin" ? ParseListenAddressOrPath(flag, options.admin)
                           : ParseListenAddress(flag, options.listen);
}

/// Checks the address of a listener. `insecure` replaces --insecure.
absl::Status CheckListener(absl::string_view flag, const ServerOptions& options, bool insecure) {
  if (flag == "--http") {
    return options.http.empty() ? absl::OkStatus() : CheckHttp(options, insecure);
  }
  const bool is_admin = flag == "--admin";
  if (is_admin && (options.admin.empty() || options.admin == kAutoPath)) return absl::OkStatus();
  LOGPROBD_ASSIGN_OR_RETURN(const ListenAddress address, GrpcAddressOf(flag, options));
  const TlsFiles::Options tls = TlsOptionsOf(options);
  const ListenerSecurity security = {.has_tls = tls.is_enabled(),
                                     .has_client_certificates = tls.needs_client_certificates(),
                                     .has_tokens = !options.tokens.empty(),
                                     .changes_weights = is_admin};
  return CheckReachable(flag, address, security, insecure);
}

absl::Status CheckAddresses(const ServerOptions& options) {
  LOGPROBD_RETURN_IF_ERROR(TlsFiles::CheckPaths(TlsOptionsOf(options)));
  for (const absl::string_view flag : kListenerFlags) {
    LOGPROBD_RETURN_IF_ERROR(CheckListener(flag, options, options.insecure));
  }
  // The path of the control socket has the suffix ".control".
  constexpr size_t kSocketPathBytesMax = sizeof(sockaddr_un::sun_path) - 1 - 8;
  if (options.local.size() > kSocketPathBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("--local: the path has ", options.local.size(),
                                                   " bytes, but must have at most ",
                                                   kSocketPathBytesMax));
  }
  return absl::OkStatus();
}

/// Checks the settings of one head, as HeadOptions returns them.
absl::Status CheckHead(const ServerOptions& head) {
  if (head.valid_vocab > 0 && head.include_padding) {
    return absl::InvalidArgumentError(
        "--valid-vocab and --include-padding contradict each other: use one of them");
  }
  if (head.softcap < 0 && head.softcap != -1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--softcap is ", head.softcap, ": it must be -1 (config.json's), 0 (no cap) or positive"));
  }
  // The engines compute with fp32.
  constexpr double kFactorMin = std::numeric_limits<float>::min();
  for (const auto& [flag, value] :
       {std::pair("--softcap", head.softcap), std::pair("--logit-scale", head.logit_scale)}) {
    if (value > 0 && value < kFactorMin) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, " is ", value, ": it must be 0 or at least ", kFactorMin));
    }
  }
  return CheckLayout(head);
}

}  // namespace

ServerOptions::ServerOptions()
    : head_name(ModelFolderOptions().head_name),
      head_tensor(ModelFolderOptions().head_tensor),
      weights_version(static_cast<int64_t>(ModelFolderOptions().weights_version)),
      include_padding(ModelFolderOptions().include_padding),
      strict_config(LogitOverrides().strict),
      device(EngineOptions().device),
      kernel(EngineOptions().kernel),
      gpus(EngineOptions().gpus),
      shards(EngineOptions().shards),
      replicas(EngineOptions().replicas),
      exchange(EngineOptions().exchange),
      cpu_threads(EngineOptions().cpu_threads),
      listen(GrpcServer::Options().listen),
      http(HttpServer::Options().listen),
      shared_memory_bytes(SharedRegions::Options().bytes_max),
      region_bytes(SharedRegions::Options().region_bytes_max),
      admin(GrpcServer::Options().admin),
      tls_cert(TlsFiles::Options().cert),
      tls_key(TlsFiles::Options().key),
      tls_client_ca(TlsFiles::Options().client_ca),
      tls_crl_dir(TlsFiles::Options().crl_dir),
      insecure(GrpcServer::Options().insecure),
      audit_required(GrpcServer::Options().audit_required),
      reflection(GrpcServer::Options().reflection),
      max_message_bytes(RequestLimits().message_bytes_max),
      receive_bytes(GrpcServer::Options().receive_bytes_max),
      streams_max(GrpcServer::Options().streams_max),
      stream_window(RequestLimits().stream_window),
      request_rows(RequestLimits().request_rows_max),
      top_k_max(RequestLimits().top_k_max),
      candidates_max(RequestLimits().candidates_max),
      segments_max(RequestLimits().segments_max),
      batch_rows(Batcher::Options().batch_rows_max),
      batch_wait_us(absl::ToInt64Microseconds(Batcher::Options().batch_wait_max)),
      queue_rows(Batcher::Options().queue_rows_max),
      queue_bytes(Batcher::Options().queue_bytes_max),
      queue_requests(Batcher::Options().queue_requests_max),
      client_share(Batcher::Options().client_share_max),
      copy_threads(Batcher::Options().copy_threads),
      log_level(LogOptions().level),
      log_format(LogOptions().format) {}

std::vector<ServerOptions> HeadOptions(const ServerOptions& options) {
  ServerOptions common = options;
  common.head_values.clear();
  std::vector<ServerOptions> heads;
  for (const HeadValue* const model : ValuesOf(options, kModel)) {
    heads.push_back(common);
    heads.back().head_name = model->head;
  }
  if (heads.empty()) heads.push_back(common);
  for (ServerOptions& head : heads) {
    head.queue_bytes =
        std::max<int64_t>(options.queue_bytes / static_cast<int64_t>(heads.size()), 1);
    for (const HeadValue& value : options.head_values) {
      if (value.head == head.head_name) {
        SetFlag(*FindFlag(value.flag), value.text, head).IgnoreError();  // the text was checked
      }
    }
  }
  return heads;
}

std::vector<std::string> InsecureListeners(const ServerOptions& options) {
  std::vector<std::string> flags;
  for (const absl::string_view flag : kListenerFlags) {
    if (!CheckListener(flag, options, /*insecure=*/false).ok()) flags.emplace_back(flag);
  }
  return flags;
}

std::vector<std::string> PublicGrpcListeners(const ServerOptions& options) {
  std::vector<std::string> flags;
  for (const absl::string_view flag : {"--listen", "--admin"}) {
    // An address that is empty or kAutoPath has no port, and so does not parse.
    const absl::StatusOr<ListenAddress> address = GrpcAddressOf(flag, options);
    if (address.ok() && address->unix_path.empty() && !address->is_loopback) {
      flags.emplace_back(flag);
    }
  }
  return flags;
}

absl::Status CheckServerOptions(const ServerOptions& options) {
  LOGPROBD_RETURN_IF_ERROR(CheckHeads(options));
  const std::vector<ServerOptions> heads = HeadOptions(options);
  for (const ServerOptions& head : heads) {
    const absl::Status status = CheckHead(head);
    if (!status.ok()) {
      return heads.size() == 1 ? status
                               : WithContext(status, absl::StrCat("head \"", head.head_name, "\""));
    }
  }
  LOGPROBD_RETURN_IF_ERROR(CheckReceiveBytes(options));
  LOGPROBD_RETURN_IF_ERROR(CheckCudaIpc(options));
  return CheckAddresses(options);
}

absl::StatusOr<Reload> PlanReload(const ServerOptions& start, const ServerOptions& current,
                                  const ServerOptions& next) {
  Reload reload;
  reload.options = current;
  for (const Flag& flag : Flags()) {
    if (FlagValueAsToml(flag, current) == FlagValueAsToml(flag, next)) continue;
    const std::string name(flag.name);
    if (!flag.is_reloadable) {
      reload.needs_restart.push_back(name);
    } else if (name == "top-k-max" && next.top_k_max > start.top_k_max) {
      reload.needs_restart.push_back(absl::StrCat(name, " above ", start.top_k_max));
    } else {
      std::visit([&](auto member) { reload.options.*member = next.*member; }, flag.member);
      reload.applied.push_back(name);
    }
  }
  LOGPROBD_RETURN_IF_ERROR(CheckServerOptions(reload.options));
  return reload;
}

}  // namespace logprobd
