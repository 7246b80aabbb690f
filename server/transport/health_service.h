#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "grpcpp/generic/async_generic_service.h"
#include "server/base/clock.h"

namespace logprobd {

/// Answers grpc.health.v1 on all listeners, for "" and "logprobd.v1.Scoring", which have the same
/// status. Everybody may call it, so nothing that a peer does may last or grow.
///
/// gRPC's own service reads messages of the size of a score, and has no limit of calls: watches of
/// one peer kept their connections and 18 KiB each for ever. Here a call is begun before its
/// message is read, so that one whose message does not arrive can be ended. Thread-safe.
class HealthService {
 public:
  struct Options {
    /// Time for a message to arrive, and for the client of a watch to end its half of the call. It
    /// bounds what gRPC collects of a message without end. Check then answers without its message;
    /// Watch ends with UNAVAILABLE.
    absl::Duration message_time_max = absl::Milliseconds(250);
    /// Time for the message of a call that begins while `waiting_calls_max` others wait for theirs.
    /// gRPC collects 100 MiB of a message in 250 ms if each frame has one byte, on each core. Usual
    /// clients send the message in the packet that begins the call.
    absl::Duration crowded_message_time_max = absl::Milliseconds(20);
    int waiting_calls_max = 8;
    /// Time for a client to take an answer of Check or the end of a watch. The call is cancelled
    /// after it. A status that a watch does not take is kept until its end.
    absl::Duration answer_time_max = absl::Seconds(10);
    /// Time after which a watch ends with UNAVAILABLE.
    absl::Duration watch_time_max = absl::Minutes(75);
    /// Maximum number of calls of a peer (PeerNetworkOf) and of all, on all listeners. The next one
    /// replaces the oldest, which is cancelled, so that no peer can lock others out.
    int peer_calls_max = 256;
    int calls_max = 4'096;
  };

  /// The status is NOT_SERVING until SetServing(true). Returns RESOURCE_EXHAUSTED if no thread can
  /// be started. `clock` must outlive the service.
  static absl::StatusOr<std::unique_ptr<HealthService>> Create(const Options& options,
                                                               const Clock& clock);
  /// No call may be left.
  ~HealthService();

  /// Returns whether `path`, such as "/grpc.health.v1.Health/Check", is a method of this service.
  static bool Serves(absl::string_view path);

  /// Returns a service for one gRPC server, which answers UNIMPLEMENTED to all methods but those of
  /// this service. This service must outlive it.
  std::unique_ptr<grpc::CallbackGenericService> NewMethods();

  /// Sets the status and sends it to all watches.
  void SetServing(bool serving);

 private:
  struct Impl;
  explicit HealthService(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
