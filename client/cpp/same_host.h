#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace logprobd::client {

/// How hidden states travel.
enum class Transport {
  kTcp,           ///< In the request.
  kUnix,          ///< In the request, over a Unix socket.
  kSharedMemory,  ///< Through memory shared with a server on this host.
  kCudaIpc,       ///< Not at all: the server reads the client's GPU memory.
};

/// "tcp", "unix", "shm" or "cuda_ipc".
absl::string_view TransportName(Transport transport);

/// Which of them a client may use.
enum class TransportChoice {
  kAuto,          ///< The shortest way that can be had.
  kTcp,           ///< In the request, always.
  kSharedMemory,  ///< So or not at all.
  kCudaIpc,       ///< So or not at all.
};

/// "auto", "tcp", "shm" or "cuda-ipc"; else INVALID_ARGUMENT.
absl::StatusOr<TransportChoice> ParseTransportChoice(absl::string_view text);

/// Rows that lie in memory of a GPU of this host, contiguous, of the caller's process. What writes
/// them must have ended before the call (an event or a stream waited for), and they must stay as
/// they are until it ends.
struct DeviceRows {
  std::array<uint8_t, 16> device_uuid = {};  ///< cudaDeviceProp::uuid of the GPU.
  /// cudaIpcMemHandle_t of the allocation, from cudaIpcGetMemHandle. Memory of cudaMallocAsync and
  /// of virtual memory management has none.
  std::array<uint8_t, 64> handle = {};
  /// Of the first row in the allocation, in bytes: a multiple of 16, as the bytes of a row must be.
  int64_t offset = 0;
  int64_t bytes = 0;  ///< rows * hidden_size * size of dtype.
};

/// Memory for rows, from Client::AllocateRows. What of it is given as ScoreArgs::hidden is scored
/// where it lies. May outlive its Client.
class RowBuffer {
 public:
  RowBuffer() = default;
  RowBuffer(std::shared_ptr<void> owner, absl::Span<std::byte> bytes, bool is_shared)
      : owner_(std::move(owner)), bytes_(bytes), is_shared_(is_shared) {}
  RowBuffer(RowBuffer&&) = default;
  RowBuffer& operator=(RowBuffer&&) = default;

  /// Its content is arbitrary at first.
  absl::Span<std::byte> bytes() const { return bytes_; }
  /// False: ordinary memory, since none can be shared with the server.
  bool is_shared() const { return is_shared_; }

 private:
  std::shared_ptr<void> owner_;
  absl::Span<std::byte> bytes_;
  bool is_shared_ = false;
};

}  // namespace logprobd::client
