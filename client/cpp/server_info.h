#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/cpp/score.h"

namespace logprobd::client {

/// Limits of one request. The client splits larger calls.
struct Limits {
  int64_t message_bytes_max = int64_t{4} << 20;
  int64_t request_rows_max = 65'536;
  int64_t top_k_max = 0;
  int64_t candidates_max = 1 << 20;
  int64_t segments_max = 65'536;
  int64_t stream_window = 0;  ///< Maximum number of unanswered chunks per stream; 0 if unknown.
};

/// A range of a head's vocabulary and the device that holds it.
struct Shard {
  int32_t replica = 0;      ///< Index from 0; each replica holds one whole head.
  int32_t shard = 0;        ///< Index from 0, in the order of the vocabulary.
  std::string device;       ///< For example "gpu0" or "cpu".
  int64_t vocab_begin = 0;  ///< First id.
  int64_t vocab_end = 0;    ///< One past the last id.
};

/// The server's description of a head.
struct Head {
  std::string name = {};
  std::string model_type = {};
  int64_t vocab_size = 0;  ///< Number of valid ids: targets lie in [0, vocab_size).
  int64_t vocab_rows = 0;  ///< Number of rows of the weight, padding included.
  int64_t hidden_size = 0;
  Dtype dtype = Dtype::kBf16;
  uint64_t weights_version = 0;
  bool ready = false;
  bool tied = false;     ///< True if the weight is the input embedding.
  float scale = 1.0F;    ///< Multiplies the logits.
  float softcap = 0.0F;  ///< Logits become softcap * tanh(logits / softcap); 0 means unchanged.
  bool has_bias = false;
  std::string tensor = {};  ///< Name of the weight in the checkpoint.
  std::string engine = {};
  int64_t weight_bytes = 0;
  Limits limits = {};
  std::vector<std::string> transports = {};
  std::vector<Shard> layout = {};  ///< Ordered by replica, then shard; empty from an old server.
  /// What is surprising about how the head was found in its files; empty from an old server.
  std::vector<std::string> warnings = {};
};

/// Ways in which a same-host client reaches the server without TCP.
struct LocalAccess {
  std::string boot_id = {};       ///< /proc/sys/kernel/random/boot_id of the server's host.
  std::string grpc_path = {};     ///< Unix socket of the same gRPC service.
  std::string control_path = {};  ///< Unix socket over which memory is shared.
  bool shared_memory = false;
  bool cuda_ipc = false;
};

struct ServerInfo {
  std::string server_version = {};
  std::optional<LocalAccess> local = {};  ///< Absent if the server has no control socket.
  std::vector<Head> heads = {};
};

/// A client's view of one of its servers, for debugging.
struct ServerState {
  enum class State {
    kUnknown,  ///< The server was not asked yet.
    kReady,    ///< The server takes requests.
    kBusy,     ///< The server refused a request because of load a moment ago.
    kOut       ///< The server failed, drains, or cannot be reached.
  };

  std::string address;
  State state = State::kUnknown;
  std::string reason = {};                                ///< Why the server is out.
  int64_t requests = 0;                                   ///< Unanswered requests of this client.
  int64_t bytes = 0;                                      ///< Bytes of those requests.
  std::map<std::string, uint64_t> weights_versions = {};  ///< Latest known version, by head.
  absl::Duration retry_in = absl::ZeroDuration();         ///< Time until the next health check.
};

struct VerifyArgs {
  std::string head = {};  ///< Empty means the only head.
  int32_t rows = 0;       ///< 1 to 64; 0 means the server's default.
  uint64_t seed = 0;      ///< 0 means the server's default.
};

/// The server's comparison of its engine with double precision, on seeded synthetic rows.
struct VerifyReport {
  bool passed = false;
  int32_t rows = 0;
  double logprob_difference_max = 0;
  double entropy_difference_max = 0;
  double logprob_tolerance = 0;
  double entropy_tolerance = 0;
  double logit_stddev = 0;  ///< Standard deviation of the logits; near 0 the test is meaningless.
  uint64_t weights_version = 0;
  std::string engine;
  double seconds = 0;
};

}  // namespace logprobd::client
