#include "server/engine/peer_collective.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/combine/peer_exchange.h"
#include "kernels/combine/peer_scores.h"
#include "server/base/errors.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/workspace_plan.h"

namespace logprobd {
namespace {

using kernels::Reduction;

constexpr int64_t kSliceBytes = kExchangeSliceBytes;

class PeerCollective final : public Collective {
 public:
  static absl::StatusOr<std::unique_ptr<Collective>> Create(absl::Span<const int32_t> gpus) {
    auto collective = std::make_unique<PeerCollective>();
    LOGPROBD_RETURN_IF_ERROR(collective->Initialize(gpus));
    return collective;
  }

  /// Frees each mailbox while its own device is current, because the thread's current device may be
  /// one that the server does not use.
  ~PeerCollective() override {
    for (Rank& rank : ranks_) {
      (void)cudaSetDevice(rank.gpu);
      rank.mailbox.reset();
    }
  }

  absl::string_view name() const override { return "peer"; }
  absl::Status AllReduce(int32_t rank, absl::Span<const Reduction> items,
                         ShardStream stream) override;
  absl::Status Gather(int32_t rank, const uint64_t* mine, int64_t count, uint64_t* all,
                      ShardStream stream) override;
  std::optional<kernels::PeerStep> TakePeerStep(int32_t rank) override {
    Rank& own = ranks_[static_cast<size_t>(rank)];
    return kernels::PeerStep{own.group, ++own.epoch};
  }
  absl::Status Check() override { return absl::OkStatus(); }

  void Abort() override {
    // Waiting kernels read this word over the bus.
    std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(abort_.get()))
        .store(1, std::memory_order_release);
  }

 private:
  struct Rank {
    int32_t gpu = 0;
    DeviceBuffer mailbox;
    kernels::PeerGroup group;
    uint64_t epoch = 0;  ///< Last epoch of the rank; only the rank's own thread uses it.
  };

  absl::Status Initialize(absl::Span<const int32_t> gpus);

  PinnedBuffer abort_;
  std::vector<Rank> ranks_;
};

absl::Status PeerCollective::Initialize(absl::Span<const int32_t> gpus) {
  LOGPROBD_ASSIGN_OR_RETURN(abort_, AllocatePinned(sizeof(uint32_t), "the shards' abort word"));
  ranks_.resize(gpus.size());
  kernels::PeerGroup group;
  group.num_ranks = static_cast<int32_t>(gpus.size());
  group.slice_bytes = kSliceBytes;
  group.abort = reinterpret_cast<const uint32_t*>(abort_.get());
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].gpu = gpus[rank];
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(gpus[rank]));
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::ProbePeerExchange());
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::ProbePeerScores());
    LOGPROBD_ASSIGN_OR_RETURN(ranks_[rank].mailbox,
                              AllocateDevice(kernels::MailboxBytes(group.num_ranks, kSliceBytes),
                                             "the exchange between shards"));
    group.mailboxes[rank] = ranks_[rank].mailbox.get();
  }
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].group = group;
    ranks_[rank].group.rank = static_cast<int32_t>(rank);
  }
  return absl::OkStatus();
}

absl::Status PeerCollective::AllReduce(int32_t rank, absl::Span<const Reduction> items,
                                       ShardStream stream) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  kernels::PeerExchangeParams params;
  params.group = own.group;
  int64_t filled_bytes = 0;
  const auto launch = [&]() -> absl::Status {
    params.epoch = ++own.epoch;
    LOGPROBD_RETURN_IF_CUDA_ERROR(kernels::LaunchPeerExchange(params, stream));
    params.num_items = 0;
    filled_bytes = 0;
    return absl::OkStatus();
  };
  // Each launch takes as many items as a slice holds; an array that does not fit is split.
  for (Reduction item : items) {
    const int64_t element_bytes = kernels::ReductionBytes(item.type);
    while (item.count > 0) {
      const int64_t room = (kSliceBytes - filled_bytes) / element_bytes;
      if (room == 0 || params.num_items == kernels::kExchangeItemsMax) {
        LOGPROBD_RETURN_IF_ERROR(launch());
        continue;
      }
      Reduction part = item;
      part.count = std::min(item.count, room);
      params.items[params.num_items++] = part;
      filled_bytes += kernels::ExchangeBytes(part);
      item.values = static_cast<std::byte*>(item.values) + part.count * element_bytes;
      item.count -= part.count;
    }
  }
  return params.num_items > 0 ? launch() : absl::OkStatus();
}

absl::Status PeerCollective::Gather(int32_t rank, const uint64_t* mine, int64_t count,
                                    uint64_t* all, ShardStream stream) {
  constexpr int64_t kCountMax = kSliceBytes / static_cast<int64_t>(sizeof(uint64_t));
  Rank& own = ranks_[static_cast<size_t>(rank)];
  for (int64_t begin = 0; begin < count; begin += kCountMax) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        kernels::LaunchPeerGather({.group = own.group,
                                   .epoch = ++own.epoch,
                                   .mine = mine + begin,
                                   .count = std::min(kCountMax, count - begin),
                                   .all = rank == 0 ? all + begin : nullptr,
                                   .all_stride = count},
                                  stream));
  }
  return absl::OkStatus();
}

/// Returns true if kernels of `gpu` can access the memory of `peer`, which may be the same GPU.
absl::StatusOr<bool> Reaches(int32_t gpu, int32_t peer) {
  if (gpu == peer) return true;
  int can_access = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaDeviceCanAccessPeer(&can_access, gpu, peer));
  return can_access != 0;
}

}  // namespace

absl::Status CheckPeerAccess(absl::Span<const int32_t> gpus) {
  for (const int32_t gpu : gpus) {
    for (const int32_t peer : gpus) {
      LOGPROBD_ASSIGN_OR_RETURN(const bool reaches, Reaches(gpu, peer));
      if (!reaches) {
        return absl::FailedPreconditionError(
            absl::StrCat("GPU ", gpu, " cannot reach the memory of GPU ", peer));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status EnablePeerAccess(absl::Span<const int32_t> gpus) {
  for (const int32_t gpu : gpus) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(gpu));
    for (const int32_t peer : gpus) {
      LOGPROBD_ASSIGN_OR_RETURN(const bool reaches, Reaches(gpu, peer));
      if (gpu == peer || !reaches) continue;
      const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();  // Otherwise the next check of a launch would return it.
        continue;
      }
      LOGPROBD_RETURN_IF_CUDA_ERROR(error);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Collective>> CreatePeerCollective(absl::Span<const int32_t> gpus) {
  LOGPROBD_RETURN_IF_ERROR(CheckPeerAccess(gpus));
  LOGPROBD_RETURN_IF_ERROR(EnablePeerAccess(gpus));
  return PeerCollective::Create(gpus);
}

}  // namespace logprobd
