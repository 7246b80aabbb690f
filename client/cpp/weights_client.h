#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace logprobd::client {

/// A version of a head's weights.
struct WeightsVersion {
  uint64_t version = 0;
  std::string sha256;  ///< Hex, of the head's rows and bias as they lie in the files.
  std::string source;  ///< Path that it was loaded from, on the server's host.
  int64_t loaded_unix_seconds = 0;
  int64_t weight_bytes = 0;
};

/// The versions that a head has.
struct HeadWeights {
  std::string head;
  std::optional<WeightsVersion> live;  ///< None: its weights were lost while they were replaced.
  std::optional<WeightsVersion> staged;
  std::optional<WeightsVersion> previous;
};

struct LoadWeightsArgs {
  std::string path = {};    ///< Folder or .safetensors file on the server's host, absolute.
  std::string head = {};    ///< Empty: the only head.
  uint64_t version = 0;     ///< New; 0: one more than the highest that the head has had.
  std::string sha256 = {};  ///< Hex, that the weights must have; empty: not compared.
  bool commit = false;      ///< Make it live at once.
  bool in_place = false;    ///< Replace the live weights where they lie; implies `commit`.
  bool allow_nonfinite = false;
};

struct LoadProgress {
  std::string phase;  ///< "checking", "verifying", "loading", "committing", in this order.
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;  ///< 0: not known.
};

/// Changes the weights of a server's heads through its admin listener (logprobd --admin). Nothing
/// is sent again: a change that was cut off may have happened, List tells. Thread-safe.
///
/// Errors are those of the service (proto/logprobd/v1/weights.proto), and UNAVAILABLE: no server
/// there; UNIMPLEMENTED: not the admin listener; DEADLINE_EXCEEDED: the timeout passed.
class WeightsClient {
 public:
  struct Options {
    /// host:port, or unix:///path.
    std::string address = "127.0.0.1:8471";
    /// Limit of each call but Load, > 0.
    absl::Duration timeout = absl::Seconds(60);
    /// Limit of Load, > 0; the server gives up when it passes.
    absl::Duration load_timeout = absl::InfiniteDuration();
  };

  /// Connects lazily. INVALID_ARGUMENT names the bad option.
  static absl::StatusOr<std::unique_ptr<WeightsClient>> Create(const Options& options);
  ~WeightsClient();

  /// Loads and waits. `progress` (may be empty) is told a few times a second, on this thread; false
  /// from it cancels the load. Whatever fails leaves the live version as it was.
  absl::StatusOr<WeightsVersion> Load(const LoadWeightsArgs& args,
                                      const std::function<bool(const LoadProgress&)>& progress);
  /// Makes the staged version live; `version` 0: whichever is staged.
  absl::StatusOr<HeadWeights> Commit(const std::string& head, uint64_t version);
  /// Makes the previous version live again.
  absl::StatusOr<HeadWeights> Rollback(const std::string& head);
  /// Drops the staged version, the previous one, or both, and their memory.
  absl::StatusOr<HeadWeights> Discard(const std::string& head, bool staged, bool previous);
  /// The versions of a head, or of all. Takes as long as reading a weight where the server does not
  /// know the sha256 of its first version yet.
  absl::StatusOr<std::vector<HeadWeights>> List(const std::string& head = "");

 private:
  struct Impl;
  explicit WeightsClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd::client
