// Replaces the driver's management library (libnvidia-ml.so.1) in tests. It has two GPUs, in
// another order than CUDA, and a slice of one. Programs find it if LD_LIBRARY_PATH contains its
// folder.

#include <atomic>
#include <cstring>

namespace {

constexpr int kSuccess = 0;
constexpr int kUninitialized = 1;
constexpr int kNotFound = 6;
constexpr unsigned long long kMib = 1ULL << 20;

struct Gpu {
  const char* bus_id;
  const char* uuid;
  unsigned int utilization_percent;
  unsigned int milliwatts;
  unsigned int megahertz;
  unsigned long long used;
  unsigned long long free;
  unsigned long long throttle_reasons;
  unsigned long long ecc_corrected;
  unsigned long long ecc_uncorrected;
};

// The GPUs are in the order of NVML. The first GPU is at its power limit, the second is hot.
const Gpu kGpus[] = {
    {"0000:3b:00.0", "GPU-b", 97, 689'500, 1'455, 60'000 * kMib, 83'000 * kMib, 0x04, 5, 1},
    {"0000:1a:00.0", "GPU-a", 42, 350'250, 1'980, 20'000 * kMib, 123'000 * kMib, 0x20 | 0x08, 2, 0},
};
// It has no index and no bus ID of its own.
const Gpu kSlice = {"", "MIG-a", 7, 0, 1'980, 1'000 * kMib, 17'000 * kMib, 0, 0, 0};

std::atomic<int> num_started = 0;
constexpr long long kOwnErrors = -1;
std::atomic<long long> corrected = kOwnErrors;

template <typename Predicate>
int Find(void** device, Predicate matches) {
  if (num_started == 0) {
    return kUninitialized;
  }
  for (const Gpu& gpu : kGpus) {
    if (matches(gpu)) {
      *device = const_cast<Gpu*>(&gpu);
      return kSuccess;
    }
  }
  return kNotFound;
}

const Gpu& Of(void* device) { return *static_cast<const Gpu*>(device); }

std::atomic<bool> is_hanging = false;
std::atomic<int> num_in_hang = 0;

}  // namespace

// The names of these functions are those of NVIDIA's library.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

struct FakeUtilization {
  unsigned int gpu;
  unsigned int memory;
};

struct FakeMemory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

int nvmlInit_v2() {
  ++num_started;
  return kSuccess;
}

int nvmlShutdown() {
  --num_started;
  return kSuccess;
}

/// Returns how many users have started the library and not yet shut it down.
int FakeNvmlNumStarted() { return num_started; }

int nvmlSystemGetDriverVersion(char* version, unsigned int length) {
  std::strncpy(version, "580.12.3", length);
  return kSuccess;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device) {
  return Find(device, [index](const Gpu& gpu) { return &gpu == kGpus + index; });
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  if (std::strcmp(uuid, kSlice.uuid) == 0) {
    *device = const_cast<Gpu*>(&kSlice);
    return kSuccess;
  }
  return Find(device, [uuid](const Gpu& gpu) { return std::strcmp(gpu.uuid, uuid) == 0; });
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** device) {
  return Find(device, [bus_id](const Gpu& gpu) { return std::strcmp(gpu.bus_id, bus_id) == 0; });
}

int nvmlDeviceGetUtilizationRates(void* device, FakeUtilization* rates) {
  *rates = {Of(device).utilization_percent, 0};
  return kSuccess;
}

int nvmlDeviceGetPowerUsage(void* device, unsigned int* milliwatts) {
  *milliwatts = Of(device).milliwatts;
  return kSuccess;
}

int nvmlDeviceGetClockInfo(void* device, int clock, unsigned int* megahertz) {
  constexpr int kSmClock = 1;
  *megahertz = clock == kSmClock ? Of(device).megahertz : 0;
  return kSuccess;
}

/// While `hangs` is true, readings of memory do not return, as with a GPU that is lost.
void FakeNvmlHang(bool hangs) {
  is_hanging = hangs;
  is_hanging.notify_all();
}

/// Waits until a reading hangs, and returns the number of readings that do.
int FakeNvmlAwaitHang() {
  num_in_hang.wait(0);
  return num_in_hang;
}

int nvmlDeviceGetMemoryInfo(void* device, FakeMemory* memory) {
  ++num_in_hang;
  num_in_hang.notify_all();
  is_hanging.wait(true);
  --num_in_hang;
  *memory = {Of(device).used + Of(device).free, Of(device).free, Of(device).used};
  return kSuccess;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* reasons) {
  *reasons = Of(device).throttle_reasons;
  return kSuccess;
}

/// Sets the number of corrected ECC errors that all GPUs report from now on; -1: their own again.
void FakeNvmlSetCorrected(long long count) { corrected = count; }

int nvmlDeviceGetTotalEccErrors(void* device, int kind, int counter, unsigned long long* count) {
  constexpr int kSinceDriverLoad = 0;
  if (counter != kSinceDriverLoad) {
    return kNotFound;
  }
  const long long of_all = corrected;
  *count = kind != 0              ? Of(device).ecc_uncorrected
           : of_all == kOwnErrors ? Of(device).ecc_corrected
                                  : static_cast<unsigned long long>(of_all);
  return kSuccess;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
