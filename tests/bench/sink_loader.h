#pragma once

#include "absl/status/statusor.h"
#include "tests/bench/server_child.h"
#include "tests/bench/sinks.h"

namespace logprobd::testing {

/// What a sink took, and what it cost.
struct SinkRate {
  double gigabytes_per_second = 0;  ///< Of hidden rows, 1e9 bytes.
  double server_cpu = 0;            ///< Seconds a GB, user and system.
  double client_cpu = 0;
};

struct SinkLoad {
  int in_flight = 1;   ///< Messages always under way.
  int senders = 1;     ///< Threads that send them.
  double seconds = 1;  ///< Measured, after a third of it untimed.
};

/// Loads a sink. The first failure of a message ends it.
absl::StatusOr<SinkRate> LoadSink(Sink& sink, const ServerChild& server, const SinkLoad& load);

}  // namespace logprobd::testing
