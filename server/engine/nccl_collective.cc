#include "server/engine/nccl_collective.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/cpu/thread_pool.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/nccl_library.h"

namespace logprobd {
namespace {

using kernels::Reduction;
using kernels::ReductionType;

/// Longest time to connect; NCCL usually needs about a second to find the links between GPUs.
constexpr absl::Duration kConnectTime = absl::Seconds(60);
/// Maximum number of thread blocks of a call. A call reduces only a few hundred kilobytes, and each
/// additional block takes tens of megabytes of memory.
constexpr int kBlocksMax = 4;
constexpr absl::Duration kConnectPause = absl::Milliseconds(1);

struct TypeAndOperation {
  ncclDataType_t type;
  ncclRedOp_t operation;
};

TypeAndOperation ToNccl(ReductionType type) {
  switch (type) {
    case ReductionType::kMaxInt32:
      return {ncclInt32, ncclMax};
    case ReductionType::kMaxUint32:
      return {ncclUint32, ncclMax};
    case ReductionType::kMaxUint64:
      return {ncclUint64, ncclMax};
    case ReductionType::kSumInt32:
      return {ncclInt32, ncclSum};
    case ReductionType::kSumInt64:
      break;
  }
  return {ncclInt64, ncclSum};
}

absl::Status Aborted() { return absl::AbortedError("the exchange between shards was aborted"); }

class NcclCollective final : public Collective {
 public:
  explicit NcclCollective(const NcclLibrary& nccl) : nccl_(nccl) {}
  ~NcclCollective() override {
    Abort();
    if (abort_thread_.joinable()) abort_thread_.join();
  }

  absl::Status Connect(absl::Span<const int32_t> gpus);

  /// Makes one call of every type on all ranks at the same time, so that NCCL allocates its memory
  /// now.
  absl::Status WarmUp(absl::Span<const int32_t> gpus);

  absl::string_view name() const override { return "nccl"; }
  absl::Status AllReduce(int32_t rank, absl::Span<const Reduction> items,
                         ShardStream stream) override;
  absl::Status Gather(int32_t rank, const uint64_t* mine, int64_t count, uint64_t* all,
                      ShardStream stream) override;
  absl::Status Check() override;
  void Abort() override;

 private:
  absl::Status StatusOf(ncclResult_t result, absl::string_view call) const {
    if (result == ncclSuccess) return absl::OkStatus();
    return CollectiveError(name(), absl::StrCat("NCCL error ", static_cast<int>(result), ": ",
                                                nccl_.get_error_string(result), " (", call, ")"));
  }

  /// Runs `calls` as one NCCL group of the rank. Waits until NCCL has enqueued them, but not until
  /// they end.
  template <typename Calls>
  absl::Status Group(int32_t rank, const Calls& calls);

  /// The communicator of a rank; null after Abort. Calls on it never block, so the mutex is held
  /// briefly.
  struct Rank {
    absl::Mutex mutex;
    ncclComm_t comm ABSL_GUARDED_BY(mutex) = nullptr;
  };

  /// Returns the state of a communicator: in progress, success, or the error of an earlier call.
  absl::StatusOr<ncclResult_t> StateOf(Rank& rank) const;

  const NcclLibrary& nccl_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::atomic<bool> is_aborted_ = false;
  std::thread abort_thread_;  ///< Ends only when no device hangs any longer.
};

absl::Status NcclCollective::Connect(absl::Span<const int32_t> gpus) {
  ncclUniqueId id;
  LOGPROBD_RETURN_IF_ERROR(StatusOf(nccl_.get_unique_id(&id), "ncclGetUniqueId"));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.minCTAs = 1;
  config.maxCTAs = kBlocksMax;
  for (size_t rank = 0; rank < gpus.size(); ++rank) ranks_.push_back(std::make_unique<Rank>());
  LOGPROBD_RETURN_IF_ERROR(StatusOf(nccl_.group_start(), "ncclGroupStart"));
  absl::Status status;
  for (size_t rank = 0; rank < gpus.size() && status.ok(); ++rank) {
    const cudaError_t chosen = cudaSetDevice(gpus[rank]);
    if (chosen != cudaSuccess) {
      status = CudaStatus(chosen, "cudaSetDevice", __FILE__, __LINE__);
      break;
    }
    const absl::MutexLock lock(&ranks_[rank]->mutex);
    const ncclResult_t result = nccl_.comm_init_rank_config(
        &ranks_[rank]->comm, static_cast<int>(gpus.size()), id, static_cast<int>(rank), &config);
    if (result != ncclInProgress) status = StatusOf(result, "ncclCommInitRankConfig");
  }
  const ncclResult_t ended = nccl_.group_end();
  if (status.ok() && ended != ncclInProgress) status = StatusOf(ended, "ncclGroupEnd");
  LOGPROBD_RETURN_IF_ERROR(status);
  const absl::Time until = absl::Now() + kConnectTime;
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
      LOGPROBD_ASSIGN_OR_RETURN(state, StateOf(*rank));
      if (state == ncclInProgress && absl::Now() > until) {
        return CollectiveError(name(), "NCCL did not connect the GPUs within a minute");
      }
      if (state == ncclInProgress) absl::SleepFor(kConnectPause);
    }
    LOGPROBD_RETURN_IF_ERROR(StatusOf(state, "connecting the GPUs"));
  }
  return absl::OkStatus();
}

template <typename Calls>
absl::Status NcclCollective::Group(int32_t rank, const Calls& calls) {
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  ncclResult_t state = ncclSuccess;
  {
    const absl::MutexLock lock(&own.mutex);
    if (own.comm == nullptr) return Aborted();
    LOGPROBD_RETURN_IF_ERROR(StatusOf(nccl_.group_start(), "ncclGroupStart"));
    const absl::Status called = calls(own.comm);
    state = nccl_.group_end();
    LOGPROBD_RETURN_IF_ERROR(called);
  }
  while (state == ncclInProgress) {
    LOGPROBD_ASSIGN_OR_RETURN(state, StateOf(own));
  }
  return StatusOf(state, "ncclGroupEnd");
}

absl::StatusOr<ncclResult_t> NcclCollective::StateOf(Rank& rank) const {
  const absl::MutexLock lock(&rank.mutex);
  if (rank.comm == nullptr) return Aborted();
  ncclResult_t state = ncclSuccess;
  LOGPROBD_RETURN_IF_ERROR(
      StatusOf(nccl_.comm_get_async_error(rank.comm, &state), "ncclCommGetAsyncError"));
  return state;
}

absl::Status NcclCollective::AllReduce(int32_t rank, absl::Span<const Reduction> items,
                                       ShardStream stream) {
  return Group(rank, [&](ncclComm_t comm) -> absl::Status {
    for (const Reduction& item : items) {
      if (item.count == 0) continue;
      const TypeAndOperation how = ToNccl(item.type);
      const ncclResult_t result =
          nccl_.all_reduce(item.values, item.values, static_cast<size_t>(item.count), how.type,
                           how.operation, comm, stream);
      if (result != ncclInProgress) {
        LOGPROBD_RETURN_IF_ERROR(StatusOf(result, "ncclAllReduce"));
      }
    }
    return absl::OkStatus();
  });
}

absl::Status NcclCollective::Gather(int32_t rank, const uint64_t* mine, int64_t count,
                                    uint64_t* all, ShardStream stream) {
  const auto size = static_cast<size_t>(count);
  if (rank == 0) {
    LOGPROBD_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(all, mine, size * sizeof(uint64_t), cudaMemcpyDeviceToDevice, stream));
  }
  return Group(rank, [&](ncclComm_t comm) -> absl::Status {
    if (rank != 0) {
      const ncclResult_t result = nccl_.send(mine, size, ncclUint64, 0, comm, stream);
      return result == ncclInProgress ? absl::OkStatus() : StatusOf(result, "ncclSend");
    }
    for (size_t peer = 1; peer < ranks_.size(); ++peer) {
      const ncclResult_t result =
          nccl_.recv(all + peer * size, size, ncclUint64, static_cast<int>(peer), comm, stream);
      if (result != ncclInProgress) {
        LOGPROBD_RETURN_IF_ERROR(StatusOf(result, "ncclRecv"));
      }
    }
    return absl::OkStatus();
  });
}

absl::Status NcclCollective::Check() {
  for (const std::unique_ptr<Rank>& rank : ranks_) {
    if (is_aborted_) {
      return absl::OkStatus();  // The team knows the reason.
    }
    const absl::StatusOr<ncclResult_t> found = StateOf(*rank);
    if (is_aborted_) return absl::OkStatus();
    LOGPROBD_RETURN_IF_ERROR(found.status());
    const ncclResult_t state = *found;
    if (state != ncclInProgress) {
      LOGPROBD_RETURN_IF_ERROR(StatusOf(state, "in a collective"));
    }
  }
  return absl::OkStatus();
}

void NcclCollective::Abort() {
  if (is_aborted_.exchange(true)) return;
  const auto abort_all = [this] {
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      ncclComm_t comm = nullptr;
      {
        const absl::MutexLock lock(&rank->mutex);
        comm = std::exchange(rank->comm, nullptr);
      }
      if (comm != nullptr) (void)nccl_.comm_abort(comm);
    }
  };
  // Aborting waits for the kernels that it ends, so it runs on a separate thread.
  absl::StatusOr<std::thread> thread = StartThread("nccl-abort", abort_all);
  if (thread.ok()) {
    abort_thread_ = *std::move(thread);
  } else {
    abort_all();
  }
}

absl::Status NcclCollective::WarmUp(absl::Span<const int32_t> gpus) {
  std::vector<absl::Status> statuses(gpus.size());
  kernels::ThreadPool threads(static_cast<int32_t>(gpus.size()));
  threads.ForEach(static_cast<int64_t>(gpus.size()), [&](int64_t index, int32_t /*thread*/) {
    const auto rank = static_cast<int32_t>(index);
    const auto i = static_cast<size_t>(index);
    CudaStream stream;
    DeviceBuffer memory;
    statuses[i] = [&]() -> absl::Status {
      LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(gpus[i]));
      LOGPROBD_ASSIGN_OR_RETURN(stream, CreateStream());
      const auto bytes = static_cast<int64_t>((gpus.size() + 1) * sizeof(uint64_t));
      LOGPROBD_ASSIGN_OR_RETURN(memory, AllocateDevice(bytes, "the warm-up of NCCL"));
      auto* const words = reinterpret_cast<uint64_t*>(memory.get());
      for (const ReductionType type :
           {ReductionType::kMaxInt32, ReductionType::kMaxUint32, ReductionType::kMaxUint64,
            ReductionType::kSumInt32, ReductionType::kSumInt64}) {
        const Reduction item = {words, 1, type};
        LOGPROBD_RETURN_IF_ERROR(AllReduce(rank, {item}, stream.get()));
      }
      LOGPROBD_RETURN_IF_ERROR(Gather(rank, words, 1, words + 1, stream.get()));
      const absl::Time until = absl::Now() + kConnectTime;
      cudaError_t state = cudaErrorNotReady;
      while (state == cudaErrorNotReady) {
        if (is_aborted_) return Aborted();
        if (absl::Now() > until) {
          return CollectiveError(name(), "the first NCCL calls did not end within a minute");
        }
        state = cudaStreamQuery(stream.get());
        if (state == cudaErrorNotReady) absl::SleepFor(kConnectPause);
      }
      LOGPROBD_RETURN_IF_CUDA_ERROR(state);
      return absl::OkStatus();
    }();
    if (statuses[i].ok()) return;
    Abort();  // Otherwise the other ranks would wait for this one.
    // The kernels of this rank use the memory until they end, which is soon after the abort.
    const absl::Time until = absl::Now() + kConnectTime;
    while (stream != nullptr && cudaStreamQuery(stream.get()) == cudaErrorNotReady &&
           absl::Now() < until) {
      absl::SleepFor(kConnectPause);
    }
  });
  absl::Status first;
  for (const absl::Status& status : statuses) {
    if (first.ok() || absl::IsAborted(first)) first = status.ok() ? first : status;
  }
  return first;
}

}  // namespace

absl::Status CheckNcclUsable() { return LoadNccl().status(); }

absl::StatusOr<std::unique_ptr<Collective>> CreateNcclCollective(absl::Span<const int32_t> gpus) {
  LOGPROBD_ASSIGN_OR_RETURN(const NcclLibrary* const nccl, LoadNccl());
  auto collective = std::make_unique<NcclCollective>(*nccl);
  LOGPROBD_RETURN_IF_ERROR(collective->Connect(gpus));
  LOGPROBD_RETURN_IF_ERROR(collective->WarmUp(gpus));
  return collective;
}

}  // namespace logprobd
