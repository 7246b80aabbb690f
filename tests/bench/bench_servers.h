#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/base/served_head.h"
#include "server/metrics/metrics.h"

// Servers to which the transport benches send load.
namespace logprobd::testing {

/// Options of the head that MakeNullHead creates.
struct NullHeadOptions {
  /// If true, the engine reads every byte of the hidden rows and returns each row's RowChecksum as
  /// its logprob.
  bool reads = false;
  /// Number of threads that read in addition to the engine's own thread. One thread reads about
  /// 5 GB/s, and a GPU reads about 55 GB/s.
  int32_t reading_threads = 7;
};

/// Creates a head with the real Batcher over an engine that computes nothing, which shows the cost
/// of everything around the engine. The hidden size is 4,096, the vocabulary 151,936. Scores are 0,
/// except the checksums of an engine that reads.
absl::StatusOr<std::shared_ptr<ServedHead>> MakeNullHead(const Clock& clock, Metrics& metrics,
                                                         const NullHeadOptions& options = {});

/// A registry that returns one head for any name.
class OneHead final : public HeadRegistry {
 public:
  explicit OneHead(std::shared_ptr<ServedHead> head) : head_(std::move(head)) {}
  absl::StatusOr<std::shared_ptr<ServedHead>> Find(absl::string_view) const override {
    return head_;
  }
  std::vector<std::shared_ptr<ServedHead>> List() const override { return {head_}; }

 private:
  const std::shared_ptr<ServedHead> head_;
};

/// A gRPC server that responds to any unary call with 8 bytes, which shows the lowest possible cost
/// of a round trip. If `copies` is true, it first copies each message to contiguous memory, which
/// shows the lowest possible cost of a bulk transfer.
class EchoServer {
 public:
  explicit EchoServer(bool copies = false);
  ~EchoServer();
  std::string address() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A server in its own process, so that its CPU time can be measured. The process runs this program
/// as `program --serve KIND`, which calls ServeUntilClosed.
class ServerChild {
 public:
  /// Starts the process and waits for its address. Returns INTERNAL if it ends without one.
  static absl::StatusOr<std::unique_ptr<ServerChild>> Start(const std::string& kind);
  /// Closes the standard input of the process and waits for its end.
  ~ServerChild();
  ServerChild(const ServerChild&) = delete;
  ServerChild& operator=(const ServerChild&) = delete;

  const std::string& address() const { return address_; }
  /// Returns the user and system time of all threads of the process so far, in seconds.
  double CpuSeconds() const;

 private:
  ServerChild(pid_t pid, int input) : pid_(pid), input_(input) {}

  const pid_t pid_;
  const int input_;
  std::string address_;
};

/// Reports the address to the parent process and returns when the parent closes the standard input.
/// Runs in the child process.
void ServeUntilClosed(const std::string& address);

}  // namespace logprobd::testing
