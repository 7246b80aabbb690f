#include "server/batching/version_replicas.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "server/base/head_info.h"

namespace logprobd {
namespace {

/// Returns the properties that determine a row's scores and the sizes of batches.
auto ScoringProperties(const ScoringEngine& engine) {
  const HeadInfo& info = engine.info();
  return std::tuple(info.name, info.weights_version, info.hidden_size, info.vocab_size,
                    info.vocab_rows, info.dtype, info.has_bias, info.scale, info.softcap,
                    info.engine, engine.batch_rows_max());
}

absl::Status CheckEngines(absl::Span<ScoringEngine* const> engines, int64_t batch_rows_max) {
  if (engines.empty()) {
    return absl::InvalidArgumentError("replicas: the list is empty; pass at least one engine");
  }
  for (size_t i = 1; i < engines.size(); ++i) {
    if (ScoringProperties(*engines[i]) != ScoringProperties(*engines.front())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "replicas: replica ", i, " has a different head or batch_rows_max than replica 0"));
    }
  }
  const int64_t engine_rows_max = engines.front()->batch_rows_max();
  if (batch_rows_max < 1 || batch_rows_max > engine_rows_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("batch_rows_max: ", batch_rows_max, " is not in [1, ", engine_rows_max, "]"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<VersionReplicas>> VersionReplicas::Create(
    const Batcher::Options& options, absl::Span<ScoringEngine* const> engines) {
  LOGPROBD_RETURN_IF_ERROR(CheckEngines(engines, options.batch_rows_max));
  const HeadInfo& head = engines.front()->info();
  const int64_t staging_bytes = Batcher::StagingBytes(options.batch_rows_max, head);
  if (options.staging != nullptr) {
    // Unusable buffers are freed first, so that memory use never exceeds its final size.
    options.staging->FreeAllBut(static_cast<int>(engines.size()), staging_bytes);
  }
  auto version = std::make_unique<VersionReplicas>(options, *engines.front());
  for (ScoringEngine* engine : engines) {
    const auto index = static_cast<int>(version->replicas.size());
    version->reads_in_place = version->reads_in_place && engine->reads_in_place();
    Replica& replica = *version->replicas.emplace_back(
        std::make_unique<Replica>(Replica{.engine = *engine, .index = index}));
    for (int i = 0; i < ScoringEngine::kBatchesInFlight; ++i) {
      LOGPROBD_ASSIGN_OR_RETURN(std::unique_ptr<StagingBuffer> staging,
                                options.staging == nullptr
                                    ? engine->AllocateStaging(staging_bytes)
                                    : options.staging->Take(index, *engine, staging_bytes));
      version->slots.push_back(std::make_unique<Slot>(*version, replica, std::move(staging)));
    }
  }
  return version;
}

VersionReplicas::VersionReplicas(const Batcher::Options& options, const ScoringEngine& engine)
    : weights_version(engine.info().weights_version),
      hidden_size(engine.info().hidden_size),
      kind(absl::StrCat(engine.info().engine, " ", DtypeName(engine.info().dtype))),
      waits_for_peers(WaitsForPeers(engine.info().layout)),
      launch_rule(options.batch_rows_max,
                  std::min(options.batch_rows_max,
                           Batcher::StagingBytes(options.batch_rows_max, engine.info()) /
                               (hidden_size * DtypeBytes(Dtype::kF32))),
                  engine, options.batch_wait_max),
      staging_(options.staging) {}

VersionReplicas::~VersionReplicas() {
  if (staging_ != nullptr) {
    for (const std::unique_ptr<Slot>& slot : slots) {
      staging_->Return(slot->replica.index, slot->batch.TakeStaging());
    }
  }
}

int VersionReplicas::NumHealthy() const {
  return static_cast<int>(
      absl::c_count_if(replicas, [](const auto& replica) { return replica->engine.healthy(); }));
}

int VersionReplicas::NumInFlight() const {
  int in_flight = 0;
  for (const std::unique_ptr<Replica>& replica : replicas) in_flight += replica->in_flight;
  return in_flight;
}

/// Among replicas with equally many batches in flight, chooses the one that is expected to be idle
/// first, then the first in order. A row's scores do not depend on the replica, so taking turns
/// would only add state.
VersionReplicas::Slot* VersionReplicas::FindFreeSlot() const {
  const auto load = [](const Slot& slot) {
    return std::pair(slot.replica.in_flight, slot.replica.idle_time());
  };
  Slot* best = nullptr;
  for (const std::unique_ptr<Slot>& slot : slots) {
    if (slot->state == SlotState::kFree && (best == nullptr || load(*slot) < load(*best)) &&
        slot->replica.engine.healthy()) {
      best = slot.get();
    }
  }
  return best;
}

std::vector<int> VersionReplicas::FreeReplicas() const {
  std::vector<int> free;
  for (const std::unique_ptr<Slot>& slot : slots) {
    const Replica& replica = slot->replica;
    const bool is_new = free.empty() || free.back() != replica.index;  // Its slots are adjacent.
    if (slot->state == SlotState::kFree && is_new && replica.engine.healthy()) {
      free.push_back(replica.index);
    }
  }
  std::stable_sort(free.begin(), free.end(), [this](int a, int b) {
    return replicas[static_cast<size_t>(a)]->in_flight <
           replicas[static_cast<size_t>(b)]->in_flight;
  });
  return free;
}

VersionReplicas::Slot& VersionReplicas::FreeSlotOf(int replica) const {
  const auto slot = absl::c_find_if(slots, [replica](const auto& candidate) {
    return candidate->state == SlotState::kFree && candidate->replica.index == replica;
  });
  LOGPROBD_CHECK(slot != slots.end(), replica);
  return **slot;
}

VersionReplicas::Slot* VersionReplicas::FindRelaunch() const {
  for (const std::unique_ptr<Slot>& slot : slots) {
    if (slot->state == SlotState::kRelaunch) return slot.get();
  }
  return nullptr;
}

int64_t VersionReplicas::staging_bytes() const {
  int64_t bytes = 0;
  for (const std::unique_ptr<Slot>& slot : slots) bytes += slot->batch.staging_bytes();
  return bytes;
}

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
  std::vector<Spare> useless;  // These are freed after the mutex is released.
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
  for (const Spare& spare : spares_) bytes += spare.buffer->size_bytes();
  return bytes;
}

}  // namespace logprobd
