#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logprobd {

/// The number and origin of a version of a head's weights; the fields of proto WeightsVersion.
struct WeightsVersion {
  uint64_t version = 0;
  std::string sha256;  ///< Hex digest of the head's rows and bias as stored in the files.
  std::string source;  ///< Path from which the version was loaded.
  int64_t loaded_unix_seconds = 0;
  int64_t weight_bytes = 0;
};

/// The versions that a head has in memory.
struct HeadWeightsState {
  std::string head;
  WeightsVersion live;
  std::optional<WeightsVersion> staged;
  std::optional<WeightsVersion> previous;
};

/// A request to load weights; the fields of proto LoadWeightsRequest.
struct WeightsLoad {
  std::string head = {};    ///< Name of the head; empty means the only head.
  std::string path = {};    ///< Path below an allowed root.
  uint64_t version = 0;     ///< 0 means one above the highest number that the head has had.
  std::string sha256 = {};  ///< Expected hex digest; empty means that it is not checked.
  bool commit = false;
  bool in_place = false;
  bool allow_nonfinite = false;
};

struct WeightsProgress {
  std::string phase;  ///< "checking", "verifying", "loading" or "committing", in this order.
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
};

/// Changes the weights of heads while they serve. The functions return the errors that proto
/// Weights documents; a call that fails leaves the live version unchanged. Thread-safe. A call may
/// take minutes, so each runs on its own thread.
class WeightStore {
 public:
  virtual ~WeightStore() = default;

  /// Calls `progress` from time to time on the caller's thread. If it returns false, the load ends
  /// with CANCELLED.
  virtual absl::StatusOr<WeightsVersion> Load(
      const WeightsLoad& load, const std::function<bool(const WeightsProgress&)>& progress) = 0;
  virtual absl::StatusOr<HeadWeightsState> Commit(absl::string_view head, uint64_t version) = 0;
  virtual absl::StatusOr<HeadWeightsState> Rollback(absl::string_view head) = 0;
  virtual absl::StatusOr<HeadWeightsState> Discard(absl::string_view head, bool staged,
                                                   bool previous) = 0;
  virtual absl::StatusOr<std::vector<HeadWeightsState>> List(absl::string_view head) const = 0;
};

}  // namespace logprobd
