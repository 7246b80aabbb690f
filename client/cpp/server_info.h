#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/cpp/score.h"

namespace logprobd::client {

/// What one request may hold; larger calls are cut by the client.
struct Limits {
  int64_t message_bytes_max = int64_t{4} << 20;
  int64_t request_rows_max = 65'536;
  int64_t top_k_max = 0;
  int64_t candidates_max = 1 << 20;
  int64_t segments_max = 65'536;
  int64_t stream_window = 0;
};

/// A part of a head's vocabulary and the device that holds it.
struct Shard {
  int32_t replica = 0;  ///< From 0; each holds one whole head.
  int32_t shard = 0;    ///< From 0, in the order of the vocabulary.
  std::string device;   ///< "gpu0", "cpu".
  int64_t vocab_begin = 0;
  int64_t vocab_end = 0;  ///< One beyond the last id.
};

/// A head as the server describes it.
struct Head {
  std::string name = {};
  std::string model_type = {};
  int64_t vocab_size = 0;  ///< Valid ids: targets lie in [0, vocab_size).
  int64_t vocab_rows = 0;  ///< Rows of the weight, padding included.
  int64_t hidden_size = 0;
  Dtype dtype = Dtype::kBf16;
  uint64_t weights_version = 0;
  bool ready = false;
  bool tied = false;
  float scale = 1.0F;
  float softcap = 0.0F;  ///< 0: none.
  bool has_bias = false;
  std::string tensor = {};
  std::string engine = {};
  int64_t weight_bytes = 0;
  Limits limits = {};
  std::vector<std::string> transports = {};
  std::vector<Shard> layout = {};  ///< Replica by replica; empty from an older server.
};

/// How a client on the server's host reaches it without TCP.
struct LocalAccess {
  std::string boot_id = {};       ///< /proc/sys/kernel/random/boot_id of the server's host.
  std::string grpc_path = {};     ///< Unix socket of the same gRPC service.
  std::string control_path = {};  ///< Unix socket over which memory is shared.
  bool shared_memory = false;
  bool cuda_ipc = false;
};

struct ServerInfo {
  std::string server_version = {};
  std::optional<LocalAccess> local = {};  ///< Absent: no local socket.
  std::vector<Head> heads = {};
};

/// What a client knows of one of its servers, for debugging.
struct ServerState {
  enum class State {
    kUnknown,  ///< Not asked yet.
    kReady,
    kBusy,  ///< It refused for load a moment ago.
    kOut    ///< It failed, drains, or could not be reached.
  };

  std::string address;
  State state = State::kUnknown;
  std::string reason = {};                                ///< Why it is out.
  int64_t requests = 0;                                   ///< Of this client, unanswered.
  int64_t bytes = 0;                                      ///< Of those requests.
  std::map<std::string, uint64_t> weights_versions = {};  ///< By head, as seen last.
  absl::Duration retry_in = absl::ZeroDuration();  ///< Until it is asked again whether it is well.
};

struct VerifyArgs {
  std::string head = {};  ///< Empty: the only head.
  int32_t rows = 0;       ///< 1 to 64; 0: the server's default.
  uint64_t seed = 0;      ///< 0: the server's default.
};

/// The server's comparison of its engine with double precision on a seeded probe.
struct VerifyReport {
  bool passed = false;
  int32_t rows = 0;
  double logprob_difference_max = 0;
  double entropy_difference_max = 0;
  double logprob_tolerance = 0;
  double entropy_tolerance = 0;
  double logit_stddev = 0;  ///< Near 0 the probe would prove nothing.
  uint64_t weights_version = 0;
  std::string engine;
  double seconds = 0;
};

}  // namespace logprobd::client
