#include "server/batching/staging_store.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "server/base/errors.h"

namespace logprobd {

absl::Status StagingStore::Reserve(int replica, ScoringEngine& engine, int64_t size_bytes,
                                   int count) {
  for (int i = 0; i < count; ++i) {
    LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<StagingBuffer> buffer,
                              engine.AllocateStaging(size_bytes));
    Return(replica, std::move(buffer));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<StagingBuffer>> StagingStore::Take(int replica,
                                                                  ScoringEngine& engine,
                                                                  int64_t size_bytes) {
  {
    const absl::MutexLock lock(&mutex_);
    const auto spare = absl::c_find_if(spares_, [&](const Spare& each) {
      return each.replica == replica && each.buffer->size_bytes() == size_bytes;
    });
    if (spare != spares_.end()) {
      std::unique_ptr<StagingBuffer> buffer = std::move(spare->buffer);
      spares_.erase(spare);
      return buffer;
    }
  }
  return engine.AllocateStaging(size_bytes);
}

void StagingStore::Return(int replica, std::unique_ptr<StagingBuffer> buffer) {
  const absl::MutexLock lock(&mutex_);
  spares_.push_back({replica, std::move(buffer)});
}

void StagingStore::FreeAllBut(int num_replicas, int64_t size_bytes) {
  std::vector<Spare> useless;  // freed after the mutex
  const absl::MutexLock lock(&mutex_);
  const auto first = std::partition(spares_.begin(), spares_.end(), [&](const Spare& spare) {
    return spare.replica < num_replicas && spare.buffer->size_bytes() == size_bytes;
  });
  std::move(first, spares_.end(), std::back_inserter(useless));
  spares_.erase(first, spares_.end());
}

int64_t StagingStore::spare_bytes() const {
  const absl::MutexLock lock(&mutex_);
  int64_t bytes = 0;
  for (const Spare& spare : spares_) {
    bytes += spare.buffer->size_bytes();
  }
  return bytes;
}

}  // namespace logprobd
