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

// Servers that the transport benches load.
namespace logprobd::testing {

/// Options of the head that MakeNullHead creates.
struct NullHeadOptions {
  /// True: the engine reads every byte of the hidden rows, and a row's logprob is its RowChecksum.
  bool reads = false;
  /// Threads that read in addition to the engine's own. One thread reads about 5 GB/s, a GPU 55.
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

/// A gRPC server that answers any unary call with 8 bytes, which is the lowest possible cost of a
/// round trip. With `copies` it first copies each message to contiguous memory, which is the lowest
/// possible cost of a bulk transfer.
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
  /// Starts the process and waits for its address. INTERNAL when it ends without one.
  static absl::StatusOr<std::unique_ptr<ServerChild>> Start(const std::string& kind);
  /// Closes the standard input of the process and waits for its end.
  ~ServerChild();
  ServerChild(const ServerChild&) = delete;
  ServerChild& operator=(const ServerChild&) = delete;

  const std::string& address() const { return address_; }
  /// User and system time of all its threads so far, in seconds.
  double CpuSeconds() const;

 private:
  ServerChild(pid_t pid, int input) : pid_(pid), input_(input) {}

  const pid_t pid_;
  const int input_;
  std::string address_;
};

/// Runs in the child: reports the address to the parent and returns when the parent is done.
void ServeUntilClosed(const std::string& address);

}  // namespace logprobd::testing
