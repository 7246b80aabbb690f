#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/base/head_info.h"

namespace logprobd {

/// The number and origin of a version of a head's weights; the fields of proto WeightsVersion.
struct WeightsVersion {
  uint64_t version = 0;
  std::string sha256;  ///< Hex digest of the head's rows and bias as stored in the files.
  std::string source;  ///< Path from which the version was loaded, or "pushed".
  int64_t loaded_unix_seconds = 0;
  int64_t weight_bytes = 0;
  Dtype dtype = Dtype::kBf16;
};

/// A version of which rows have arrived; the fields of proto PushedVersion.
struct PushedVersion {
  uint64_t version = 0;
  int64_t rows = 0;        ///< Number of rows that have arrived.
  int64_t vocab_rows = 0;  ///< Number of rows of the weight.
};

/// The versions that a head has in memory.
struct HeadWeightsState {
  std::string head;
  WeightsVersion live;
  std::optional<WeightsVersion> staged;
  std::optional<WeightsVersion> previous;
  std::optional<PushedVersion> pushed = {};
  uint64_t highest_version = 0;  ///< Highest number that a staged or live version has ever had.
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

/// The version to which the rows of a push belong; the fields of proto PushHeader.
struct WeightsPush {
  std::string head = {};  ///< Name of the head; empty means the only head.
  uint64_t version = 0;
  Dtype dtype = Dtype::kBf16;
  int64_t vocab_rows = 0;   ///< 0 means as many as the live version has.
  std::string sha256 = {};  ///< Expected hex digest; empty means that it is not checked.
  bool allow_nonfinite = false;
};

/// Consecutive rows of a weight, or elements of its bias, as stored.
struct PushedRows {
  int64_t row_begin = 0;
  int64_t num_rows = 0;
  bool is_bias = false;
  std::vector<absl::Span<const std::byte>> pieces = {};  ///< Their bytes, cut anywhere.
};

/// Returns the next rows of a push, whose bytes stay valid until the next call, or nothing at its
/// end. Waits for them. An error ends the push.
using NextPushedRows = std::function<absl::StatusOr<std::optional<PushedRows>>()>;

/// What a push has achieved; the fields of proto PushWeightsResponse.
struct PushedWeightsResult {
  PushedVersion pushed;
  std::optional<WeightsVersion> staged;
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

  /// Returns the name of the head that a call for `head` means: that of the only head if `head` is
  /// empty. Returns `head` if there are several.
  virtual std::string NameOf(absl::string_view head) const = 0;

  /// Calls `progress` from time to time on the caller's thread. If it returns false, the load ends
  /// with CANCELLED.
  virtual absl::StatusOr<WeightsVersion> Load(
      const WeightsLoad& load, const std::function<bool(const WeightsProgress&)>& progress) = 0;
  /// Adds the rows that `next` returns to those of other pushes of the version, and stages the
  /// version if no other row is missing. Meanwhile calls `progress` as Load does.
  virtual absl::StatusOr<PushedWeightsResult> Push(
      const WeightsPush& push, const NextPushedRows& next,
      const std::function<bool(const WeightsProgress&)>& progress) = 0;
  virtual absl::StatusOr<HeadWeightsState> Commit(absl::string_view head, uint64_t version) = 0;
  virtual absl::StatusOr<HeadWeightsState> Rollback(absl::string_view head) = 0;
  virtual absl::StatusOr<HeadWeightsState> Discard(absl::string_view head, bool staged,
                                                   bool previous) = 0;
  virtual absl::StatusOr<std::vector<HeadWeightsState>> List(absl::string_view head) const = 0;
};

}  // namespace logprobd
