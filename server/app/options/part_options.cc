#include "server/app/options/part_options.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "server/base/errors.h"
#include "server/base/scoring_engine.h"
#include "server/weights/hub_cache.h"

namespace logprobd {
namespace {

/// Returns the first folder of $STATE_DIRECTORY, which systemd sets for services with
/// StateDirectory=, or an empty string.
std::string ServiceStateDir() {
  const char* const folders = std::getenv("STATE_DIRECTORY");
  return folders == nullptr ? "" : std::vector<std::string>(absl::StrSplit(folders, ':')).front();
}

}  // namespace

ModelFolderOptions ModelOptionsOf(const ServerOptions& options) {
  ModelFolderOptions result;
  result.head_name = options.head_name;
  result.head_tensor = options.head_tensor;
  if (options.valid_vocab > 0) result.valid_vocab = options.valid_vocab;
  result.include_padding = options.include_padding;
  if (options.softcap >= 0) result.logits.softcap = options.softcap;
  if (options.logit_scale > 0) result.logits.scale = options.logit_scale;
  result.logits.ignored_keys =
      absl::StrSplit(options.ignore_config_key, ':', absl::SkipWhitespace());
  result.logits.strict = options.strict_config;
  result.weights_version = static_cast<uint64_t>(options.weights_version);
  return result;
}

EngineOptions EngineOptionsOf(const ServerOptions& options) {
  EngineOptions result;
  result.device = options.device;
  result.kernel = options.kernel;
  result.batch_rows_max = options.batch_rows;
  result.top_k_max = static_cast<int32_t>(options.top_k_max);
  result.cpu_threads = static_cast<int32_t>(options.cpu_threads);
  result.gpus = options.gpus;
  result.shards = static_cast<int32_t>(options.shards);
  result.replicas = static_cast<int32_t>(options.replicas);
  result.exchange = options.exchange;
  result.state_dir = options.state_dir == "auto" ? ServiceStateDir() : options.state_dir;
  return result;
}

absl::StatusOr<std::shared_ptr<const AllowedRoots>> WeightsRootsOf(const ServerOptions& options) {
  if (options.weights_root == "none") return nullptr;
  if (!options.weights_root.empty()) {
    absl::StatusOr<AllowedRoots> roots =
        AllowedRoots::Create(absl::StrSplit(options.weights_root, ',', absl::SkipWhitespace()));
    LOGPROBD_RETURN_IF_ERROR(WithContext(roots.status(), "--weights-root"));
    return std::make_shared<const AllowedRoots>(*std::move(roots));
  }
  std::vector<std::string> folders = HubFoldersOf(options.model);
  if (folders.empty()) {
    std::error_code error;
    const std::filesystem::path model = std::filesystem::canonical(options.model, error);
    const std::filesystem::path parent = model.parent_path();
    folders.push_back((parent == parent.root_path() ? model : parent).string());
  }
  absl::StatusOr<AllowedRoots> roots = AllowedRoots::Create(folders);
  if (!roots.ok()) {
    return nullptr;  // opening the model reports the error
  }
  return std::make_shared<const AllowedRoots>(*std::move(roots));
}

int NumStagingBuffers(const ServerOptions& options) {
  const bool is_swappable = !options.admin.empty() && options.weights_root != "none";
  return ScoringEngine::kBatchesInFlight * (is_swappable ? 2 : 1);
}

constexpr absl::Duration kDefaultWatchdog = absl::Seconds(120);

absl::Duration BatchTimeMaxOf(const ServerOptions& options, Device device) {
  if (options.watchdog_s > 0) return absl::Seconds(options.watchdog_s);
  return device == Device::kCuda ? kDefaultWatchdog : absl::InfiniteDuration();
}

absl::Duration HangTimeMaxOf(const ServerOptions& options) {
  // An engine needs up to 0.25 s to notice that a batch is late, and up to 5 s until the batch's
  // memory is at rest.
  constexpr absl::Duration kEngineFirst = absl::Seconds(6);
  return (options.watchdog_s > 0 ? absl::Seconds(options.watchdog_s) : kDefaultWatchdog) +
         kEngineFirst;
}

/// Number of additional threads that send answers. Sending one answer takes about 25 us and a batch
/// may have dozens of them, so that a single thread would delay the engine's next batch.
constexpr int32_t kAnswerThreads = 3;

Batcher::Options BatcherOptionsOf(const ServerOptions& options) {
  Batcher::Options result;
  result.batch_rows_max = options.batch_rows;
  result.batch_wait_max = absl::Microseconds(options.batch_wait_us);
  result.queue_rows_max = options.queue_rows;
  result.queue_bytes_max = options.queue_bytes;
  result.queue_requests_max = options.queue_requests;
  result.client_share_max = options.client_share;
  result.copy_threads = static_cast<int32_t>(options.copy_threads);
  result.answer_threads = kAnswerThreads;
  result.head = options.head_name;
  return result;
}

TlsFiles::Options TlsOptionsOf(const ServerOptions& options) {
  return {.cert = options.tls_cert,
          .key = options.tls_key,
          .client_ca = options.tls_client_ca,
          .crl_dir = options.tls_crl_dir};
}

RequestLimits LimitsOf(const ServerOptions& options) {
  const QueueLoad client = Batcher::ClientLimits(BatcherOptionsOf(options));
  RequestLimits limits;
  limits.request_rows_max = std::min(options.request_rows, client.rows);
  limits.message_bytes_max = std::min(options.max_message_bytes, client.bytes);
  limits.top_k_max = static_cast<int32_t>(options.top_k_max);
  limits.candidates_max = options.candidates_max;
  limits.segments_max = options.segments_max;
  limits.stream_window = static_cast<int32_t>(options.stream_window);
  return limits;
}

int64_t SharedMemoryBytesMax(const ServerOptions& options) {
  return options.local.empty() ? 0 : options.shared_memory_bytes;
}

}  // namespace logprobd
