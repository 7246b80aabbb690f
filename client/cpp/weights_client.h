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
#include "client/cpp/score.h"
#include "client/cpp/tls.h"

namespace logprobd::client {

/// A version of a head's weights.
struct WeightsVersion {
  uint64_t version = 0;
  std::string sha256;  ///< Hex digest of the head's rows and bias as stored in the files.
  std::string source;  ///< Path on the server's host from which it was loaded.
  int64_t loaded_unix_seconds = 0;
  int64_t weight_bytes = 0;
  Dtype dtype{};  ///< Of the weight. A server of version 0.2 or older sends none.
};

/// A version of which clients have pushed rows (Weights.Push) and others are missing.
struct PushedVersion {
  uint64_t version = 0;
  int64_t rows = 0;        ///< Number of rows that have arrived.
  int64_t vocab_rows = 0;  ///< Number of rows of the weight.
};

/// The versions of a head's weights.
struct HeadWeights {
  std::string head;
  std::optional<WeightsVersion> live;  ///< Absent if an in-place replacement failed half-way.
  std::optional<WeightsVersion> staged;
  std::optional<WeightsVersion> previous;
  std::optional<PushedVersion> pushed;
  /// Highest number that a staged or live version has ever had; every higher number is free.
  uint64_t highest_version = 0;
};

struct LoadWeightsArgs {
  std::string path = {};  ///< Absolute path of a folder or .safetensors file on the server's host.
  std::string head = {};  ///< Name of the head; empty means the only head.
  /// Number of the new version, above all that have been live; 0 means one more than the highest so
  /// far. The number of a version that was live is accepted with the same weights.
  uint64_t version = 0;
  std::string sha256 = {};  ///< Expected hex digest; if it is empty, the digest is not compared.
  bool commit = false;      ///< Whether to make the version live at once.
  bool in_place = false;    ///< Whether to overwrite the live weights; implies `commit`.
  bool allow_nonfinite = false;  ///< Whether to accept weights with NaN or Inf.
};

struct LoadProgress {
  std::string phase;  ///< "checking", then "verifying", "loading" and "committing".
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;  ///< 0 if it is unknown.
};

/// Changes the weights of a server's heads through its admin listener (logprobd --admin). Calls are
/// not retried: after a broken connection, List shows whether a change took effect. Thread-safe.
///
/// The methods return the errors of the service (proto/logprobd/v1/weights.proto), UNAVAILABLE if
/// the server cannot be reached, UNIMPLEMENTED if the address is not the admin listener, and
/// DEADLINE_EXCEEDED if the timeout passed.
class WeightsClient {
 public:
  struct Options {
    /// host:port, unix:///path, or auto, the socket of a server of this user that runs with --admin
    /// auto and the default --listen.
    std::string address = "auto";
    /// Time limit of each call except Load, > 0.
    absl::Duration timeout = absl::Seconds(60);
    /// Time limit of Load, > 0; the server stops loading when it passes.
    absl::Duration load_timeout = absl::InfiniteDuration();
    /// Files for TLS to a server that runs with --tls-cert. If absent, the connection is plaintext.
    std::optional<Tls> tls = {};
    /// Token with the scope admin, for servers that run with --tokens. If it is empty, none is
    /// sent.
    std::string token = {};
  };

  /// Creates a client, which connects at its first call. Returns INVALID_ARGUMENT, which names the
  /// option, if an option is invalid.
  static absl::StatusOr<std::unique_ptr<WeightsClient>> Create(const Options& options);
  ~WeightsClient();

  /// Loads a version and waits until it is loaded. `progress`, which may be empty, is called a few
  /// times per second on the calling thread; it cancels the load by returning false. A failed load
  /// does not change the live version, unless it was `in_place`.
  absl::StatusOr<WeightsVersion> Load(const LoadWeightsArgs& args,
                                      const std::function<bool(const LoadProgress&)>& progress);
  /// Makes the staged version live. `version` must be its number, or 0 to accept any version.
  absl::StatusOr<HeadWeights> Commit(const std::string& head, uint64_t version);
  /// Makes the previous version live again.
  absl::StatusOr<HeadWeights> Rollback(const std::string& head);
  /// Drops the staged version, the previous version, or both, and frees their memory. Pushed rows
  /// are dropped with the staged version.
  absl::StatusOr<HeadWeights> Discard(const std::string& head, bool staged, bool previous);
  /// Returns the versions of a head, or of all heads if `head` is "". If the server does not know
  /// the sha256 of its first version yet, the call takes as long as reading the weights.
  absl::StatusOr<std::vector<HeadWeights>> List(const std::string& head = "");

 private:
  struct Impl;
  explicit WeightsClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd::client
