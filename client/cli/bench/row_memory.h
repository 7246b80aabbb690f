#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/score.h"

namespace logprobd::client {

/// Where the load's rows lie: the heap, or a region that the server maps too, into which the client
/// then writes its rows directly. Called by one thread.
class RowMemory {
 public:
  virtual ~RowMemory() = default;
  /// RESOURCE_EXHAUSTED when there is no room, and the errors of Client::AllocateRows.
  virtual absl::StatusOr<RowBuffer> Allocate(int64_t bytes) = 0;
};

class HeapRowMemory final : public RowMemory {
 public:
  absl::StatusOr<RowBuffer> Allocate(int64_t bytes) override;
};

/// Memory that the client shares with its server, where there is some to be had.
class ClientRowMemory final : public RowMemory {
 public:
  explicit ClientRowMemory(Client& client) : client_(client) {}
  absl::StatusOr<RowBuffer> Allocate(int64_t bytes) override { return client_.AllocateRows(bytes); }

 private:
  Client& client_;
};

}  // namespace logprobd::client
