#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

// Choices of the parts of the server, whose headers are not included here: engines.h and log.h.
enum class Device;
enum class GpuKernel;
enum class Exchange;
enum class LogLevel;
enum class LogFormat;

/// Largest version number of weights. JSON and metrics represent it and its successor exactly.
inline constexpr int64_t kWeightsVersionMax = 9'000'000'000'000'000;

/// The value of a flag for one head only, as in `--shards policy=2`.
struct HeadValue {
  absl::string_view flag;  ///< Name of the flag, as in the flag table.
  std::string head;
  std::string text;  ///< The value as written, already checked.
};

/// Value of --local and --admin for a Unix socket in a private folder.
inline constexpr char kAutoPath[] = "auto";

/// All settings of the server, as parsed. The table of Flags() (flags.h) states the meaning, unit
/// and range of each member. A member without an initialiser has the default of the part of the
/// server to which it belongs.
struct ServerOptions {
  ServerOptions();

  /// Values for single heads, in the order in which they were given. The members below hold the
  /// values of all other heads; HeadOptions combines both.
  std::vector<HeadValue> head_values;

  /// Folder, file or Hugging Face id of the only head; several heads have theirs in `head_values`.
  std::string model;
  std::string head_name;
  std::string head_tensor;
  int64_t weights_version;
  std::string weights_root;  ///< Comma-separated folders, or "none". If empty, see WeightsRootsOf.
  int64_t valid_vocab = 0;
  bool include_padding;
  double softcap = -1;            ///< -1: that of config.json.
  double logit_scale = 0;         ///< 0: that of config.json.
  std::string ignore_config_key;  ///< Names separated by colons.
  bool strict_config;

  Device device;
  GpuKernel kernel;
  std::vector<int32_t> gpus;  ///< Empty means auto.
  int64_t shards;             ///< 0 means auto.
  int64_t replicas;           ///< 0 means auto.
  double watchdog_s = 0;      ///< If 0, see BatchTimeMaxOf.
  Exchange exchange;
  int64_t cpu_threads;

  std::string listen;
  std::string http;
  std::string local = kAutoPath;
  int64_t shared_memory_bytes;
  int64_t region_bytes;
  bool cuda_ipc = false;
  std::string admin;  ///< May also be kAutoPath.
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;
  std::string tls_crl_dir;
  bool insecure;
  std::string tokens;  ///< TOML file of ReadTokenFile; empty means that callers need no entry.
  bool audit_required;
  bool reflection;

  int64_t max_message_bytes;
  int64_t receive_bytes;
  int64_t streams_max;
  int64_t stream_window;
  int64_t request_rows;
  int64_t top_k_max;
  int64_t candidates_max;
  int64_t segments_max;
  double push_idle_s = 600;

  int64_t batch_rows;
  int64_t batch_wait_us;
  int64_t queue_rows;
  int64_t queue_bytes;
  int64_t queue_requests;
  double client_share;
  int64_t copy_threads;

  double grace_s = 30;
  std::string state_dir = "auto";  ///< See EngineOptionsOf.
  LogLevel log_level;
  LogFormat log_format;

  std::string config;
  bool dry_run = false;
  bool print_config = false;
  bool version = false;
};

/// Returns the settings of each head in the order of --model, as a server with that head alone
/// would have them: `model`, `head_name` and the values of flags that heads can set are the head's
/// own, and `queue_bytes` is its equal share. With one head the only element equals `options`.
std::vector<ServerOptions> HeadOptions(const ServerOptions& options);

/// Returns the flags of the listeners that others can use without authentication, which only
/// --insecure permits. `options` must have passed CheckServerOptions.
std::vector<std::string> InsecureListeners(const ServerOptions& options);

/// Returns the flags of the gRPC listeners that other hosts may reach: those with an address that
/// is neither loopback nor a Unix socket. `options` must have passed CheckServerOptions.
std::vector<std::string> PublicGrpcListeners(const ServerOptions& options);

/// Checks what the range of a single flag cannot express: combinations of flags, names and
/// addresses. Returns INVALID_ARGUMENT or FAILED_PRECONDITION that names the flags. If settings
/// pass, no part of the server later rejects them because of their values alone.
absl::Status CheckServerOptions(const ServerOptions& options);

/// Effect of SIGHUP on settings that have been read again.
struct Reload {
  ServerOptions options;                   ///< Settings in force after the reload.
  std::vector<std::string> applied;        ///< Names of changed flags with new values in `options`.
  std::vector<std::string> needs_restart;  ///< Names of changed flags that only a restart applies.
};

/// Compares the newly read settings `next` with `current`. `start` holds the settings at the start,
/// which determine the workspace: a `top_k_max` above the one in `start` needs a restart. Returns
/// the errors of CheckServerOptions for the settings that would be in force.
absl::StatusOr<Reload> PlanReload(const ServerOptions& start, const ServerOptions& current,
                                  const ServerOptions& next);

}  // namespace logprobd
