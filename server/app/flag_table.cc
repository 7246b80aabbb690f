#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "server/app/server_options.h"
#include "server/engine/engines.h"

namespace logprobd {
namespace {

constexpr double kMillion = 1e6;
constexpr double kKib = 1024;
constexpr double kGib = kKib * kKib * kKib;
constexpr double kTib = kKib * kGib;
constexpr double kPlacesMax = 256;
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

std::vector<Flag> MakeFlags() {
  return {
      OfHead({"model", "Model", Kind::kText, &O::model, "[NAME=]DIR",
              "Hugging Face folder, or .safetensors file; NAME=DIR for each of several heads"}),
      {"head-name", "Model", Kind::kText, &O::head_name, "NAME",
       "Name of the only head; several have theirs in --model. Not \"unknown\""},
      OfHead({"head-tensor", "Model", Kind::kText, &O::head_tensor, "NAME",
              "Tensor of the head; empty: found by name and config.json"}),
      OfHead({"weights-version", "Model", Kind::kInteger, &O::weights_version, "NUMBER",
              "Version that answers report and requests may pin", 1, 9e15}),
      {"weights-root", "Model", Kind::kText, &O::weights_root, "DIRS",
       "Folders to load new weights from, with commas; empty: that around --model; none: off"},
      OfHead({"valid-vocab", "Model", Kind::kInteger, &O::valid_vocab, "ROWS",
              "Rows from here on are padding; 0: as config.json says", 0, kInt32Max}),
      OfHead({"include-padding", "Model", Kind::kSwitch, &O::include_padding, "",
              "Let all rows of the tensor take part"}),

      {"device",
       "Engine",
       Kind::kChoice,
       &O::device,
       "NAME",
       "auto takes a GPU where there is one",
       0,
       0,
       {"auto", "cpu", "cuda"}},
      {"kernel",
       "Engine",
       Kind::kChoice,
       &O::kernel,
       "NAME",
       "How a GPU scores; auto: fused where it runs",
       0,
       0,
       {"auto", "fused", "chunked"}},
      OfHead({"gpus", "Engine", Kind::kGpus, &O::gpus, "LIST",
              "CUDA devices, as 0,1,2,3; auto: all that are visible", 0, 1'023}),
      OfHead({"shards", "Engine", Kind::kCount, &O::shards, "SHARDS",
              "GPUs that share one head; auto: as few as hold it, twice if they can", 1,
              kPlacesMax}),
      OfHead({"replicas", "Engine", Kind::kCount, &O::replicas, "REPLICAS",
              "Whole heads, each on its own shards; auto: as many as there is room for", 1,
              kPlacesMax}),
      {"watchdog-s", "Engine", Kind::kNumber, &O::watchdog_s, "SECONDS",
       "Longest time of a batch; 0: 120 on GPUs, none on a CPU", 0, 86'400},
      {"exchange",
       "Engine",
       Kind::kChoice,
       &O::exchange,
       "MEANS",
       "How shards exchange; auto: peer memory, else NCCL",
       0,
       0,
       {"auto", "peer", "nccl"}},
      {"cpu-threads", "Engine", Kind::kInteger, &O::cpu_threads, "THREADS",
       "0: all cores the process may use", 0, 4'096},

      {"listen", "Listeners", Kind::kText, &O::listen, "HOST:PORT", "gRPC; port 0: a free one"},
      {"http", "Listeners", Kind::kAddress, &O::http, "HOST:PORT",
       "/metrics, /healthz, /readyz, a status page; none: off"},
      {"local", "Listeners", Kind::kAddress, &O::local, "PATH",
       "Unix sockets: gRPC, shared memory; auto: in a private folder; none: off"},
      {"shared-memory-bytes", "Listeners", Kind::kBytes, &O::shared_memory_bytes, "BYTES",
       "Memory of all regions that clients of this host share; 0: off", 0, kTib},
      {"region-bytes", "Listeners", Kind::kBytes, &O::region_bytes, "BYTES",
       "Largest region of one client", kKib, kTib},
      {"cuda-ipc", "Listeners", Kind::kSwitch, &O::cuda_ipc, "",
       "Read rows out of GPU memory of clients of this host"},
      {"admin", "Listeners", Kind::kAddress, &O::admin, "HOST:PORT",
       "gRPC to load and commit new weights; none: off"},
      {"insecure", "Listeners", Kind::kSwitch, &O::insecure, "",
       "Allow an address that is not loopback, without TLS"},
      {"reflection", "Listeners", Kind::kSwitch, &O::reflection, "", "Serve gRPC reflection"},

      {"max-message-bytes", "Limits", Kind::kBytes, &O::max_message_bytes, "BYTES",
       "Largest gRPC message", kKib, kInt32Max},
      {"receive-bytes", "Limits", Kind::kBytes, &O::receive_bytes, "BYTES",
       "Memory for messages being received or queued, over all connections", kKib * kKib, kTib},
      {"streams-max", "Limits", Kind::kInteger, &O::streams_max, "CALLS",
       "Concurrent calls of one connection", 1, kMillion},
      Reloadable({"stream-window", "Limits", Kind::kInteger, &O::stream_window, "CHUNKS",
                  "Unanswered chunks of one stream", 1, kKib}),
      Reloadable({"request-rows", "Limits", Kind::kInteger, &O::request_rows, "ROWS",
                  "Most rows of a request or chunk", 1, kInt32Max}),
      Reloadable({"top-k-max", "Limits", Kind::kInteger, &O::top_k_max, "IDS", "Largest top_k", 0,
                  kTopKMax}),
      Reloadable({"candidates-max", "Limits", Kind::kInteger, &O::candidates_max, "IDS",
                  "Most candidate ids of a request", 0, kInt32Max}),
      Reloadable({"segments-max", "Limits", Kind::kInteger, &O::segments_max, "SEGMENTS",
                  "Most segments of a request", 0, kInt32Max}),

      {"batch-rows", "Batching", Kind::kInteger, &O::batch_rows, "ROWS",
       "Most rows of an engine call; fixes the workspace", 1, kKib * kKib},
      Reloadable({"batch-wait-us", "Batching", Kind::kInteger, &O::batch_wait_us, "MICROSECONDS",
                  "Longest wait for company while one batch is in flight", 0, kMillion}),
      Reloadable({"queue-rows", "Batching", Kind::kInteger, &O::queue_rows, "ROWS",
                  "Most rows waiting for a head", 1, 1e12}),
      Reloadable({"queue-bytes", "Batching", Kind::kBytes, &O::queue_bytes, "BYTES",
                  "Most bytes of requests and unsent answers, over all heads", kKib, kTib}),
      Reloadable({"queue-requests", "Batching", Kind::kInteger, &O::queue_requests, "REQUESTS",
                  "Most requests waiting for a head", 1, 1e9}),
      Reloadable({"client-share", "Batching", Kind::kNumber, &O::client_share, "RATIO",
                  "Share of the queue that one client may hold", 1e-6, 1}),
      {"copy-threads", "Batching", Kind::kInteger, &O::copy_threads, "THREADS",
       "Threads that gather payloads", 1, 256},

      Reloadable({"grace-s", "Process", Kind::kNumber, &O::grace_s, "SECONDS",
                  "Time for work in flight after SIGTERM", 0, 86'400}),
      Reloadable({"log-level",
                  "Process",
                  Kind::kChoice,
                  &O::log_level,
                  "LEVEL",
                  "Least level of lines",
                  0,
                  0,
                  {"debug", "info", "warning", "error"}}),
      {"log-format",
       "Process",
       Kind::kChoice,
       &O::log_format,
       "FORMAT",
       "Form of a log line",
       0,
       0,
       {"text", "json"}},
      {"config", "Process", Kind::kText, &O::config, "FILE",
       "TOML file with any of these settings"},

      {"dry-run",
       "Actions",
       Kind::kSwitch,
       &O::dry_run,
       "",
       "Print the plan (head, engine, memory) and stop",
       0,
       0,
       {},
       true},
      {"print-config",
       "Actions",
       Kind::kSwitch,
       &O::print_config,
       "",
       "Print all settings as TOML, with where each came from, and stop",
       0,
       0,
       {},
       true},
      {"version",
       "Actions",
       Kind::kSwitch,
       &O::version,
       "",
       "Print the version and stop",
       0,
       0,
       {},
       true},
  };
}

}  // namespace

absl::Span<const Flag> Flags() {
  static const auto* const flags = new std::vector<Flag>(MakeFlags());
  return *flags;
}

}  // namespace logprobd
