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

/// A version of a head's weights: the fields of proto WeightsVersion.
struct WeightsVersion {
  uint64_t version = 0;
  std::string sha256;  ///< Hex, of the head's rows and bias as they lie in the files.
  std::string source;  ///< Path that it was loaded from.
  int64_t loaded_unix_seconds = 0;
  int64_t weight_bytes = 0;
};

/// The versions that a head has.
struct HeadWeightsState {
  std::string head;
  WeightsVersion live;
  std::optional<WeightsVersion> staged;
  std::optional<WeightsVersion> previous;
};

/// What to load: the fields of proto LoadWeightsRequest.
struct WeightsLoad {
  std::string head = {};    ///< Empty: the only head.
  std::string path = {};    ///< Must lie below an allowed root.
  uint64_t version = 0;     ///< 0: one more than the highest that the head has had.
  std::string sha256 = {};  ///< Hex; empty: not compared.
  bool commit = false;
  bool in_place = false;
  bool allow_nonfinite = false;
};

struct WeightsProgress {
  std::string phase;  ///< "checking", "verifying", "loading", "committing", in this order.
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
};

/// Changes the weights of heads while they serve. Errors are those of proto Weights, and whatever
/// fails leaves the live version as it was. Thread-safe; the calls take as long as they take, so
/// they come from threads of their own.
class WeightStore {
 public:
  virtual ~WeightStore() = default;

  /// `progress` is told now and then, on the caller's thread; false from it gives the load up
  /// (CANCELLED).
  virtual absl::StatusOr<WeightsVersion> Load(
      const WeightsLoad& load, const std::function<bool(const WeightsProgress&)>& progress) = 0;
  virtual absl::StatusOr<HeadWeightsState> Commit(absl::string_view head, uint64_t version) = 0;
  virtual absl::StatusOr<HeadWeightsState> Rollback(absl::string_view head) = 0;
  virtual absl::StatusOr<HeadWeightsState> Discard(absl::string_view head, bool staged,
                                                   bool previous) = 0;
  virtual absl::StatusOr<std::vector<HeadWeightsState>> List(absl::string_view head) const = 0;
};

}  // namespace logprobd
