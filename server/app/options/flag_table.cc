#include <limits>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "server/app/options/flags.h"
#include "server/base/log.h"
#include "server/engine/engines.h"

namespace logprobd {
namespace {

constexpr double kMillion = 1e6;
constexpr double kKib = 1024;
constexpr double kGib = kKib * kKib * kKib;
constexpr double kTib = kKib * kGib;
constexpr double kShardsMax = 256;
constexpr double kLogitFactorMax = 1e30;
constexpr double kInt32Max = std::numeric_limits<int32_t>::max();

using Kind = Flag::Kind;
using O = ServerOptions;

Flag OfHead(Flag flag) {
  flag.is_of_head = true;
  return flag;
}

Flag Reloadable(Flag flag) {
  flag.is_reloadable = true;
  return flag;
}

Flag Choice(Flag flag, std::vector<Flag::Choice> choices) {
  flag.choices = std::move(choices);
  return flag;
}

Flag Action(Flag flag) {
  flag.command_line_only = true;
  return flag;
}

std::vector<Flag> MakeFlags() {
  return {
      OfHead({"model", "Model", Kind::kText, &O::model, "[NAME=]DIR",
              "Hugging Face model folder, or .safetensors file, that contains the head; or the id "
              "of a model in Hugging Face's cache, such as Qwen/Qwen3-8B. NAME=DIR names one of "
              "several heads."}),
      {"head-name", "Model", Kind::kText, &O::head_name, "NAME",
       "Name of the only head; several heads take their names from --model. The name "
       "\"unknown\" is reserved."},
      OfHead({"head-tensor", "Model", Kind::kText, &O::head_tensor, "NAME",
              "Name of the head's tensor in the checkpoint. If it is empty, the server finds the "
              "tensor by the usual names and config.json."}),
      OfHead({"weights-version", "Model", Kind::kInteger, &O::weights_version, "NUMBER",
              "Version number of the weights, which responses report and requests may pin.", 1,
              static_cast<double>(kWeightsVersionMax)}),
      {"weights-root", "Model", Kind::kText, &O::weights_root, "DIRS",
       "Comma-separated folders from which new weights may be loaded. If it is empty, this is the "
       "folder that contains --model; none turns loading off."},
      OfHead({"valid-vocab", "Model", Kind::kInteger, &O::valid_vocab, "ROWS",
              "Number of valid vocabulary rows; later rows are padding. 0 takes the number from "
              "config.json.",
              0, kInt32Max}),
      OfHead({"include-padding", "Model", Kind::kSwitch, &O::include_padding, "",
              "Treat every row of the tensor as a valid vocabulary row, padding included."}),
      OfHead(
          {"softcap", "Model", Kind::kNumber, &O::softcap, "CAP",
           "Soft cap of the logits, cap * tanh(z / cap), instead of that of config.json. 0 means "
           "no cap; -1 takes it from config.json.",
           -1, kLogitFactorMax}),
      OfHead({"logit-scale", "Model", Kind::kNumber, &O::logit_scale, "FACTOR",
              "Factor of the products of hidden states and weight, instead of that of config.json. "
              "0 takes it from config.json.",
              0, kLogitFactorMax}),
      OfHead(
          {"ignore-config-key", "Model", Kind::kText, &O::ignore_config_key, "NAMES",
           "Keys of config.json or names of tensors, separated by colons, that do not change the "
           "logits although their names suggest it. model_type serves any model as a plain head."}),
      OfHead({"strict-config", "Model", Kind::kSwitch, &O::strict_config, "",
              "Refuse a model whose type is not known, instead of serving a plain head with a "
              "warning."}),

      Choice({"device", "Engine", Kind::kChoice, &O::device, "NAME",
              "Device that computes scores; auto takes a GPU if there is one, otherwise the CPU."},
             {{"auto", Device::kAuto}, {"cpu", Device::kCpu}, {"cuda", Device::kCuda}}),
      Choice({"kernel", "Engine", Kind::kChoice, &O::kernel, "NAME",
              "Kernel that computes scores on a GPU; auto takes the fused kernel where it runs, "
              "otherwise the chunked one."},
             {{"auto", GpuKernel::kAuto},
              {"fused", GpuKernel::kFused},
              {"chunked", GpuKernel::kChunked}}),
      OfHead({"gpus", "Engine", Kind::kGpus, &O::gpus, "LIST",
              "CUDA device ordinals to use, such as 0,1,2,3; auto uses all visible GPUs.", 0,
              1'023}),
      OfHead({"shards", "Engine", Kind::kCount, &O::shards, "SHARDS",
              "Number of GPUs that share one head; auto takes the smallest number that can hold it "
              "twice, or else the smallest number that can hold it once.",
              1, kShardsMax}),
      OfHead(
          {"replicas", "Engine", Kind::kCount, &O::replicas, "REPLICAS",
           "Number of complete copies of the head, each on its own shards; auto makes as many as "
           "fit.",
           1, kShardsMax}),
      {"watchdog-s", "Engine", Kind::kNumber, &O::watchdog_s, "SECONDS",
       "Longest time for which work may stand still. After it, the replica of a batch counts as "
       "hung; if a thread hangs, so that this does not help, the process ends 6 s later. 0 means "
       "120 s; a batch on a CPU then has no limit while it moves.",
       0, 86'400},
      Choice(
          {"exchange", "Engine", Kind::kChoice, &O::exchange, "MEANS",
           "How shards on different GPUs exchange data; auto takes peer memory if all GPUs reach "
           "each other, otherwise NCCL."},
          {{"auto", Exchange::kAuto}, {"peer", Exchange::kPeer}, {"nccl", Exchange::kNccl}}),
      {"cpu-threads", "Engine", Kind::kInteger, &O::cpu_threads, "THREADS",
       "Threads of the CPU engine; 0 uses all cores that the process may use.", 0, 4'096},

      {"listen", "Listeners", Kind::kText, &O::listen, "HOST:PORT",
       "Address of the gRPC service; port 0 takes a free port."},
      {"http", "Listeners", Kind::kAddress, &O::http, "ADDRESS",
       "Address of /metrics, /healthz, /readyz and the status page. https://HOST:PORT has TLS with "
       "--tls-cert and --tls-key; none turns HTTP off."},
      {"local", "Listeners", Kind::kAddress, &O::local, "PATH",
       "Path of the Unix sockets for clients on the same host (gRPC and shared memory); auto "
       "takes a private folder, none turns them off."},
      {"shared-memory-bytes", "Listeners", Kind::kBytes, &O::shared_memory_bytes, "BYTES",
       "Maximum total memory of all regions that the server shares with clients on the same host; "
       "0 turns shared memory off.",
       0, kTib},
      {"region-bytes", "Listeners", Kind::kBytes, &O::region_bytes, "BYTES",
       "Maximum size of one shared-memory region of a client.", kKib, kTib},
      {"cuda-ipc", "Listeners", Kind::kSwitch, &O::cuda_ipc, "",
       "Read rows directly from the GPU memory of clients on the same host."},
      {"admin", "Listeners", Kind::kAddress, &O::admin, "ADDRESS",
       "Address of the gRPC service that loads and commits new weights: auto takes a Unix socket "
       "in a private folder, unix:PATH another one, each for this user and root only; HOST:PORT "
       "needs TLS with client certificates or tokens, also on loopback; none turns it off."},
      {"tls-cert", "Listeners", Kind::kText, &O::tls_cert, "FILE",
       "PEM file with the server's certificate and its chain, for TLS on --listen and --admin, and "
       "on --http where it is https://. It is read again when it changes and at SIGHUP. If it is "
       "empty, there is no TLS."},
      {"tls-key", "Listeners", Kind::kText, &O::tls_key, "FILE",
       "PEM file with the private key of --tls-cert, without a passphrase."},
      {"tls-client-ca", "Listeners", Kind::kText, &O::tls_client_ca, "FILE",
       "PEM file with the CAs of the clients, which must then have a certificate (mTLS); its name "
       "may have an entry in --tokens."},
      {"tls-crl-dir", "Listeners", Kind::kText, &O::tls_crl_dir, "DIR",
       "Folder with the revocation lists of the clients' CAs, as PEM under any name."},
      {"insecure", "Listeners", Kind::kSwitch, &O::insecure, "",
       "Allow addresses that others can use without client certificates or tokens over TLS: all "
       "except Unix sockets and, for --listen and --http, loopback."},
      {"tokens", "Listeners", Kind::kText, &O::tokens, "FILE",
       "TOML file of the tokens and client certificates that callers need, whose entries "
       "logprobctl token prints. The pages of HTTP need a token too, except /healthz and /readyz. "
       "SIGHUP reads it again."},
      {"audit-required", "Listeners", Kind::kSwitch, &O::audit_required, "",
       "Refuse changes of weights whose audit line cannot be written to standard error within a "
       "second. Otherwise lost lines are only counted (logprobd_log_lines_lost_total)."},
      {"reflection", "Listeners", Kind::kSwitch, &O::reflection, "", "Serve gRPC reflection."},

      {"max-message-bytes", "Limits", Kind::kBytes, &O::max_message_bytes, "BYTES",
       "Maximum size of a gRPC message.", kKib, kInt32Max},
      {"receive-bytes", "Limits", Kind::kBytes, &O::receive_bytes, "BYTES",
       "Maximum memory for messages that are being received or queued, over all connections of "
       "--listen, and as much again for those of --admin.",
       kKib * kKib, kTib},
      {"streams-max", "Limits", Kind::kInteger, &O::streams_max, "CALLS",
       "Maximum number of concurrent calls on one connection.", 1, kMillion},
      Reloadable({"stream-window", "Limits", Kind::kInteger, &O::stream_window, "CHUNKS",
                  "Maximum number of unanswered chunks of one stream.", 1, kKib}),
      Reloadable({"request-rows", "Limits", Kind::kInteger, &O::request_rows, "ROWS",
                  "Maximum number of rows of one request or of one stream chunk.", 1, kInt32Max}),
      Reloadable({"top-k-max", "Limits", Kind::kInteger, &O::top_k_max, "IDS",
                  "Maximum top_k of a request.", 0, kTopKMax}),
      Reloadable({"candidates-max", "Limits", Kind::kInteger, &O::candidates_max, "IDS",
                  "Maximum number of candidate ids of one request.", 0, kInt32Max}),
      Reloadable({"segments-max", "Limits", Kind::kInteger, &O::segments_max, "SEGMENTS",
                  "Maximum number of segments of one request.", 0, kInt32Max}),
      {"push-idle-s", "Limits", Kind::kNumber, &O::push_idle_s, "SECONDS",
       "Time after which the rows of an unfinished push are dropped if no call adds to them.", 1,
       604'800},

      {"batch-rows", "Batching", Kind::kInteger, &O::batch_rows, "ROWS",
       "Maximum number of rows of one batch; this fixes the size of the engine's workspace.", 1,
       kKib * kKib},
      Reloadable(
          {"batch-wait-us", "Batching", Kind::kInteger, &O::batch_wait_us, "MICROSECONDS",
           "Longest time that a batch waits for more requests while every replica has a batch "
           "in flight.",
           0, kMillion}),
      Reloadable({"queue-rows", "Batching", Kind::kInteger, &O::queue_rows, "ROWS",
                  "Maximum number of rows that may wait for one head.", 1, 1e12}),
      Reloadable(
          {"queue-bytes", "Batching", Kind::kBytes, &O::queue_bytes, "BYTES",
           "Maximum number of bytes of waiting requests and unsent responses, over all heads.",
           kKib, kTib}),
      Reloadable({"queue-requests", "Batching", Kind::kInteger, &O::queue_requests, "REQUESTS",
                  "Maximum number of requests that may wait for one head.", 1, 1e9}),
      Reloadable({"client-share", "Batching", Kind::kNumber, &O::client_share, "RATIO",
                  "Share of the queue that one client may occupy.", 1e-6, 1}),
      {"copy-threads", "Batching", Kind::kInteger, &O::copy_threads, "THREADS",
       "Threads that copy rows from messages into staging memory.", 1, 256},

      Reloadable({"grace-s", "Process", Kind::kNumber, &O::grace_s, "SECONDS",
                  "Time that work in flight may take after SIGTERM before it is cancelled.", 0,
                  86'400}),
      {"state-dir", "Process", Kind::kAddress, &O::state_dir, "DIR",
       "Folder in which the server remembers for which GPU models and drivers it has checked that "
       "all paths sum alike; otherwise it checks at each start. auto takes $STATE_DIRECTORY, which "
       "systemd sets, if there is one; none turns it off."},
      Reloadable(Choice({"log-level", "Process", Kind::kChoice, &O::log_level, "LEVEL",
                         "Lowest level of log lines that are written."},
                        {{"debug", LogLevel::kDebug},
                         {"info", LogLevel::kInfo},
                         {"warning", LogLevel::kWarning},
                         {"error", LogLevel::kError}})),
      Choice({"log-format", "Process", Kind::kChoice, &O::log_format, "FORMAT",
              "Format of a log line."},
             {{"text", LogFormat::kText}, {"json", LogFormat::kJson}}),
      {"config", "Process", Kind::kText, &O::config, "FILE",
       "TOML file that may contain any of these settings."},

      Action({"dry-run", "Actions", Kind::kSwitch, &O::dry_run, "",
              "Print the plan (heads, engines, memory) and exit."}),
      Action({"print-config", "Actions", Kind::kSwitch, &O::print_config, "",
              "Print all settings as TOML, each with its source, and exit."}),
      Action({"version", "Actions", Kind::kSwitch, &O::version, "", "Print the version and exit."}),
  };
}

}  // namespace

absl::Span<const Flag> Flags() {
  static const auto* const flags = new std::vector<Flag>(MakeFlags());
  return *flags;
}

}  // namespace logprobd
