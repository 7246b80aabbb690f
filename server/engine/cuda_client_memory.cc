#include "server/engine/cuda_client_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/node_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/clock.h"
#include "server/base/errors.h"
#include "server/base/host.h"
#include "server/base/log.h"
#include "server/engine/cuda_resources.h"

namespace logprobd {
namespace {

class CudaHostPinning final : public HostPinning {
 public:
  explicit CudaHostPinning(int32_t gpu) : gpu_(gpu) {}

  absl::Status Pin(absl::Span<std::byte> memory) override {
    // Without this call, CUDA would create a context on GPU 0.
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(gpu_));
    const cudaError_t error =
        cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable);
    if (error == cudaSuccess) return absl::OkStatus();
    (void)cudaGetLastError();
    return absl::ResourceExhaustedError(
        absl::StrCat(memory.size(),
                     " bytes of memory could not be pinned for GPUs: ", cudaGetErrorString(error)));
  }

  void Unpin(absl::Span<std::byte> memory) override {
    (void)cudaSetDevice(gpu_);
    const cudaError_t error = cudaHostUnregister(memory.data());
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    LogWarning("client memory could not be unpinned", {{"error", cudaGetErrorString(error)}});
  }

  bool pins() const override { return true; }

 private:
  const int32_t gpu_;
};

using Uuid = std::array<uint8_t, 16>;
using Handle = std::array<uint8_t, 64>;
static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(Handle));

/// A GPU whose memory clients may share.
struct Gpu {
  Uuid uuid = {};
  int32_t ordinal = 0;
};

/// The type of the driver's cuMemGetAddressRange, which has no counterpart in the runtime API. The
/// program does not link libcuda, so that it starts without a driver.
using AddressRange = CUresult (*)(CUdeviceptr* base, size_t* size, CUdeviceptr pointer);

absl::StatusOr<AddressRange> FindAddressRange() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function,
                                                                 3'020, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    return absl::FailedPreconditionError("--cuda-ipc: the driver has no cuMemGetAddressRange");
  }
  return reinterpret_cast<AddressRange>(function);
}

/// Returns the GPUs that score and the GPUs that all of them can access.
absl::StatusOr<std::vector<Gpu>> ReachableGpus(const std::vector<int32_t>& scoring) {
  int count = 0;
  LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGetDeviceCount(&count));
  std::vector<Gpu> gpus;
  for (int32_t ordinal = 0; ordinal < count; ++ordinal) {
    bool is_reached = true;
    for (const int32_t reader : scoring) {
      int can_access = reader == ordinal ? 1 : 0;
      if (can_access == 0) {
        LOGPROBD_RETURN_IF_CUDA_ERROR(cudaDeviceCanAccessPeer(&can_access, reader, ordinal));
      }
      is_reached = is_reached && can_access != 0;
    }
    if (!is_reached) continue;
    cudaDeviceProp properties{};
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, ordinal));
    Gpu gpu{.ordinal = ordinal};
    std::memcpy(gpu.uuid.data(), properties.uuid.bytes, gpu.uuid.size());
    gpus.push_back(gpu);
  }
  return gpus;
}

/// Converts an error from opening a handle. None of these errors is sticky.
absl::Status OpenStatus(cudaError_t error) {
  (void)cudaGetLastError();
  const std::string why = cudaGetErrorString(error);
  switch (error) {
    case cudaErrorInvalidValue:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorMapBufferObjectFailed:
      return absl::InvalidArgumentError(
          absl::StrCat("cuda_ipc.handle: the handle names no memory of another process: ", why));
    case cudaErrorMemoryAllocation:
    case cudaErrorTooManyPeers:
      return absl::ResourceExhaustedError(
          absl::StrCat("cuda_ipc.handle: the memory cannot be mapped: ", why));
    case cudaErrorDeviceUninitialized:
      return absl::FailedPreconditionError(
          "cuda_ipc.handle: the handle names memory of the server's own process: send the rows as "
          "hidden");
    default:
      return absl::FailedPreconditionError(absl::StrCat(
          "cuda_ipc.handle: this host does not share the memory: ", why,
          " (containers need a common IPC and PID namespace): send the rows as hidden"));
  }
}

struct Mapping {
  enum class State { kOpening, kOpen, kClosing };
  State state = State::kOpening;
  int32_t gpu = 0;
  std::byte* data = nullptr;
  int64_t bytes = 0;
  int64_t uses = 0;
  absl::Time idle_since;
};

/// Holds the open mappings and the thread that closes idle ones.
class Mappings {
 public:
  Mappings(CudaIpcOptions options, std::vector<Gpu> gpus, AddressRange address_range)
      : options_(std::move(options)), gpus_(std::move(gpus)), address_range_(address_range) {}

  absl::Status Start() {
    LOGPROBD_ASSIGN_OR_RETURN(thread_, StartThread("cuda-ipc", [this] { Run(); }));
    return absl::OkStatus();
  }

  void Stop() {
    {
      const absl::MutexLock lock(&mutex_);
      is_stopping_ = true;
      wake_ = true;
    }
    if (thread_.joinable()) thread_.join();
  }

  /// Returns the mapping of the slice's allocation and counts one use, which Release ends.
  absl::StatusOr<Mapping*> Use(const DeviceSlice& slice);
  void Release(Mapping& mapping);
  int64_t size() const {
    const absl::MutexLock lock(&mutex_);
    return static_cast<int64_t>(mappings_.size());
  }

 private:
  using Key = std::pair<int32_t, Handle>;

  void Run();
  absl::Time CloseIdleLocked(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<int32_t> OrdinalOf(const Uuid& uuid) const;
  absl::Status Map(const Handle& handle, Mapping& mapping) const;
  static void Unmap(const Mapping& mapping);
  void CountLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (options_.metrics != nullptr) {
      options_.metrics->SetCudaIpcMappings(static_cast<int64_t>(mappings_.size()));
    }
  }

  const CudaIpcOptions options_;
  const std::vector<Gpu> gpus_;
  const AddressRange address_range_;
  mutable absl::Mutex mutex_;
  absl::node_hash_map<Key, Mapping> mappings_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_check_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool wake_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

absl::StatusOr<int32_t> Mappings::OrdinalOf(const Uuid& uuid) const {
  for (const Gpu& gpu : gpus_) {
    if (gpu.uuid == uuid) return gpu.ordinal;
  }
  return absl::FailedPreconditionError(
      absl::StrCat("cuda_ipc.device_uuid: ",
                   absl::BytesToHexString(
                       absl::string_view(reinterpret_cast<const char*>(uuid.data()), uuid.size())),
                   " is not a GPU that this server uses or reaches: send the rows as hidden"));
}

absl::StatusOr<Mapping*> Mappings::Use(const DeviceSlice& slice) {
  LOGPROBD_ASSIGN_OR_RETURN(const int32_t gpu, OrdinalOf(slice.device_uuid));
  const Key key(gpu, slice.handle);
  Mapping* mapping = nullptr;
  {
    // A handle is opened only once, so callers wait while another thread opens or closes it.
    const auto is_settled = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const auto found = mappings_.find(key);
      return found == mappings_.end() || found->second.state == Mapping::State::kOpen;
    };
    const absl::MutexLock lock(&mutex_, absl::Condition(&is_settled));
    if (const auto found = mappings_.find(key); found != mappings_.end()) {
      ++found->second.uses;
      return &found->second;
    }
    if (static_cast<int64_t>(mappings_.size()) >= options_.mappings_max) {
      return WithRetryAfter(
          absl::ResourceExhaustedError(absl::StrCat(
              "cuda_ipc: all ", options_.mappings_max,
              " mappings of GPU memory are in use: use fewer allocations, or try later")),
          options_.idle_time_max);
    }
    mapping = &mappings_[key];
    mapping->gpu = gpu;
  }
  absl::Status status = Map(slice.handle, *mapping);
  const absl::MutexLock lock(&mutex_);
  if (!status.ok()) {
    mappings_.erase(key);
    return status;
  }
  mapping->state = Mapping::State::kOpen;
  mapping->uses = 1;
  CountLocked();
  return mapping;
}

absl::Status Mappings::Map(const Handle& handle, Mapping& mapping) const {
  cudaError_t error = cudaSetDevice(mapping.gpu);
  if (error != cudaSuccess) return OpenStatus(error);
  cudaIpcMemHandle_t cuda_handle{};
  std::memcpy(&cuda_handle, handle.data(), handle.size());
  void* data = nullptr;
  error = cudaIpcOpenMemHandle(&data, cuda_handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) return OpenStatus(error);
  mapping.data = static_cast<std::byte*>(data);
  CUdeviceptr base = 0;
  size_t size = 0;
  const auto address = reinterpret_cast<CUdeviceptr>(data);
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess ||
      attributes.type != cudaMemoryTypeDevice || attributes.device != mapping.gpu ||
      address_range_(&base, &size, address) != CUDA_SUCCESS) {
    Unmap(mapping);
    return absl::InvalidArgumentError("cuda_ipc.device_uuid: the memory is not on this GPU");
  }
  mapping.bytes = static_cast<int64_t>(base + size - address);
  return absl::OkStatus();
}

void Mappings::Unmap(const Mapping& mapping) {
  cudaError_t error = cudaSetDevice(mapping.gpu);
  if (error == cudaSuccess) error = cudaIpcCloseMemHandle(mapping.data);
  (void)cudaGetLastError();
  if (error != cudaSuccess) {
    LogWarning("a mapping of client GPU memory could not be closed",
               {{"error", cudaGetErrorString(error)}});
  }
}

void Mappings::Release(Mapping& mapping) {
  const absl::MutexLock lock(&mutex_);
  if (--mapping.uses > 0) return;
  mapping.idle_since = Clock::Steady().Now();
  wake_ = wake_ || mapping.idle_since + options_.idle_time_max < next_check_ || is_stopping_;
}

/// Closes the mappings that have been idle for idle_time_max, or all idle mappings if the thread is
/// stopping. Returns the time of the next check.
absl::Time Mappings::CloseIdleLocked(absl::Time now) {
  const auto is_due = [&](const Mapping& mapping) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return mapping.state == Mapping::State::kOpen && mapping.uses == 0 &&
           (is_stopping_ || mapping.idle_since + options_.idle_time_max <= now);
  };
  for (auto entry = mappings_.begin(); entry != mappings_.end();) {
    if (!is_due(entry->second)) {
      ++entry;
      continue;
    }
    entry->second.state = Mapping::State::kClosing;
    const Key key = entry->first;
    const Mapping closed = entry->second;
    mutex_.Unlock();
    Unmap(closed);
    mutex_.Lock();
    mappings_.erase(key);
    CountLocked();
    entry = mappings_.begin();
  }
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [key, mapping] : mappings_) {
    if (mapping.state == Mapping::State::kOpen && mapping.uses == 0) {
      next = std::min(next, mapping.idle_since + options_.idle_time_max);
    }
  }
  return next;
}

void Mappings::Run() {
  const absl::MutexLock lock(&mutex_);
  while (!is_stopping_) {
    wake_ = false;
    next_check_ = CloseIdleLocked(Clock::Steady().Now());
    Clock::Steady().AwaitUntil(mutex_, absl::Condition(&wake_), next_check_);
  }
  CloseIdleLocked(Clock::Steady().Now());
}

class CudaIpcMemory final : public DeviceMemory {
 public:
  explicit CudaIpcMemory(std::unique_ptr<Mappings> mappings) : mappings_(std::move(mappings)) {}
  ~CudaIpcMemory() override { mappings_->Stop(); }

  absl::StatusOr<HiddenPayload> Open(const DeviceSlice& slice) override {
    LOGPROBD_ASSIGN_OR_RETURN(Mapping* const mapping, mappings_->Use(slice));
    HiddenPayload payload;
    payload.owner =
        std::shared_ptr<void>(mapping, [this](Mapping* used) { mappings_->Release(*used); });
    if (slice.offset > mapping->bytes || slice.bytes > mapping->bytes - slice.offset) {
      return absl::InvalidArgumentError(
          absl::StrCat("cuda_ipc: the slice has ", slice.bytes, " bytes from offset ", slice.offset,
                       ", but the allocation has only ", mapping->bytes, " bytes"));
    }
    payload.pieces = {
        absl::MakeConstSpan(mapping->data + slice.offset, static_cast<size_t>(slice.bytes))};
    payload.bytes = slice.bytes;
    payload.place = PayloadPlace::kDevice;
    payload.gpu = mapping->gpu;
    return payload;
  }

  absl::Status CopyToHost(const HiddenPayload& slice, int64_t offset,
                          absl::Span<std::byte> out) override {
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaSetDevice(slice.gpu));
    LOGPROBD_ASSIGN_OR_RETURN(const CudaStream stream, CreateStream());
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(out.data(), slice.pieces[0].data() + offset,
                                                  out.size(), cudaMemcpyDeviceToHost,
                                                  stream.get()));
    LOGPROBD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream.get()));
    return absl::OkStatus();
  }

  int64_t num_mappings() const override { return mappings_->size(); }

 private:
  const std::unique_ptr<Mappings> mappings_;
};

}  // namespace

std::unique_ptr<HostPinning> CreateCudaHostPinning(int32_t gpu) {
  return std::make_unique<CudaHostPinning>(gpu);
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateCudaIpcMemory(CudaIpcOptions options) {
  LOGPROBD_ASSIGN_OR_RETURN(const AddressRange address_range, FindAddressRange());
  LOGPROBD_ASSIGN_OR_RETURN(std::vector<Gpu> gpus, ReachableGpus(options.gpus));
  auto mappings = std::make_unique<Mappings>(std::move(options), std::move(gpus), address_range);
  LOGPROBD_RETURN_IF_ERROR(mappings->Start());
  return std::make_unique<CudaIpcMemory>(std::move(mappings));
}

}  // namespace logprobd
