#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"

namespace logprobd::testing {

/// Shape of a message: just below 8 MiB, with targets and lengths.
inline constexpr int64_t kSinkHidden = 4'096;
inline constexpr int64_t kSinkRowBytes = kSinkHidden * 2;
inline constexpr int64_t kSinkRows = 1'020;
inline constexpr int64_t kSinkHiddenBytes = kSinkRows * kSinkRowBytes;

/// Random rows and what an engine that reads them must answer (row_checksum.h).
struct SinkRows {
  explicit SinkRows(uint64_t seed = 1);

  std::vector<std::byte> hidden;  ///< [kSinkRows, kSinkHidden] of 2 bytes.
  std::vector<int32_t> targets;   ///< [kSinkRows]
  std::vector<float> checksums;   ///< [kSinkRows]
};

/// Something that takes messages of SinkRows.
class Sink {
 public:
  using Sent = std::function<void(absl::Status)>;

  virtual ~Sink() = default;
  /// `sent` is called once, on any thread, when the answer is there and right. Threads may send at
  /// once.
  virtual void Send(Sent sent) = 0;
};

/// The service over a null engine that reads, through this project's client; DATA_LOSS when a row's
/// checksum is not what was sent. `rows` must outlive it.
absl::StatusOr<std::unique_ptr<Sink>> MakeServiceSink(const client::Client::Options& options,
                                                      const SinkRows& rows);

/// As MakeServiceSink, but the rows of each message are written anew, by the thread that sends it,
/// as a trainer does, into memory of the client's AllocateRows. At most `in_flight` messages at
/// once.
absl::StatusOr<std::unique_ptr<Sink>> MakeWritingSink(const client::Client::Options& options,
                                                      int in_flight);

/// Rows that are written in the same way, into memory of the heap, and go nowhere.
std::unique_ptr<Sink> MakeCopySink(int in_flight);

/// A bare gRPC server (EchoServer) over `channels` connections, called as plainly as can be. `rows`
/// must outlive it.
std::unique_ptr<Sink> MakeBareGrpcSink(const std::string& address, int channels,
                                       const SinkRows& rows);

}  // namespace logprobd::testing
