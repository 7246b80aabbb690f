#include "server/metrics/nvml.h"

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace logprobd {
namespace {

// These are the declarations of nvml.h that are used. Its ABI is stable.
using NvmlDevice = struct NvmlDeviceOpaque*;
constexpr int kNvmlSuccess = 0;
constexpr int kNvmlClockSm = 1;
constexpr int kNvmlEccCorrected = 0;
constexpr int kNvmlEccUncorrected = 1;
constexpr int kNvmlEccSinceDriverLoad = 0;
constexpr unsigned int kNvmlVersionBytes = 80;
// Bits of the reasons for which the clocks are lowered.
constexpr unsigned long long kNvmlPowerCap = 0x04;
constexpr unsigned long long kNvmlHwSlowdown = 0x08;
constexpr unsigned long long kNvmlThermal = 0x20 | 0x40;  // Slowdown by software or hardware.
constexpr unsigned long long kNvmlPowerBrake = 0x80;

struct NvmlUtilization {
  unsigned int gpu;  ///< In percent.
  unsigned int memory;
};

struct NvmlMemory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

/// Returns the entry of CUDA_VISIBLE_DEVICES for CUDA device `gpu`, or an empty string if there is
/// none. NVML knows neither this variable nor CUDA's ordinals.
std::string VisibleDevice(int gpu) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr || *visible == '\0') return "";
  const std::vector<std::string> entries = absl::StrSplit(visible, ',');
  return static_cast<size_t>(gpu) < entries.size() ? entries[static_cast<size_t>(gpu)] : "";
}

}  // namespace

struct Nvml::Impl {
  void* library = nullptr;
  bool started = false;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*by_index)(unsigned int, NvmlDevice*) = nullptr;
  int (*by_uuid)(const char*, NvmlDevice*) = nullptr;
  int (*by_bus_id)(const char*, NvmlDevice*) = nullptr;
  int (*utilization)(NvmlDevice, NvmlUtilization*) = nullptr;
  int (*power)(NvmlDevice, unsigned int*) = nullptr;
  int (*clock)(NvmlDevice, int, unsigned int*) = nullptr;
  int (*memory)(NvmlDevice, NvmlMemory*) = nullptr;
  // These are null if the driver does not provide them.
  int (*driver_version)(char*, unsigned int) = nullptr;
  int (*throttle)(NvmlDevice, unsigned long long*) = nullptr;
  int (*ecc)(NvmlDevice, int, int, unsigned long long*) = nullptr;

  template <typename Function>
  bool Load(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }

  NvmlDevice Device(int gpu, const std::string& pci_bus_id) const {
    NvmlDevice device = nullptr;
    const std::string entry = VisibleDevice(gpu);
    // A MIG slice is looked up by its own name, since the bus ID identifies the whole GPU.
    if (!pci_bus_id.empty() && !absl::StartsWith(entry, "MIG-")) {
      return by_bus_id(pci_bus_id.c_str(), &device) == kNvmlSuccess ? device : nullptr;
    }
    int index = gpu;
    if (absl::StartsWith(entry, "GPU-") || absl::StartsWith(entry, "MIG-")) {
      return by_uuid(entry.c_str(), &device) == kNvmlSuccess ? device : nullptr;
    }
    if (!entry.empty() && !absl::SimpleAtoi(entry, &index)) return nullptr;
    return by_index(static_cast<unsigned int>(index), &device) == kNvmlSuccess ? device : nullptr;
  }

  GpuThrottle Throttle(NvmlDevice device) const {
    unsigned long long reasons = 0;
    if (throttle == nullptr || throttle(device, &reasons) != kNvmlSuccess) return {};
    return {.power_cap = (reasons & kNvmlPowerCap) != 0,
            .thermal = (reasons & kNvmlThermal) != 0,
            .power_brake = (reasons & kNvmlPowerBrake) != 0,
            .hw_slowdown = (reasons & kNvmlHwSlowdown) != 0};
  }

  uint64_t EccErrors(NvmlDevice device, int kind) const {
    unsigned long long count = 0;
    const bool is_read =
        ecc != nullptr && ecc(device, kind, kNvmlEccSinceDriverLoad, &count) == kNvmlSuccess;
    return is_read ? count : 0;
  }
};

Nvml::Nvml() : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (impl.library == nullptr) return;
  const bool complete = impl.Load("nvmlInit_v2", impl.init) &&
                        impl.Load("nvmlShutdown", impl.shutdown) &&
                        impl.Load("nvmlDeviceGetHandleByIndex_v2", impl.by_index) &&
                        impl.Load("nvmlDeviceGetHandleByUUID", impl.by_uuid) &&
                        impl.Load("nvmlDeviceGetHandleByPciBusId_v2", impl.by_bus_id) &&
                        impl.Load("nvmlDeviceGetUtilizationRates", impl.utilization) &&
                        impl.Load("nvmlDeviceGetPowerUsage", impl.power) &&
                        impl.Load("nvmlDeviceGetClockInfo", impl.clock) &&
                        impl.Load("nvmlDeviceGetMemoryInfo", impl.memory);
  // Tries the newer name first; drivers before 535 provide only the older one.
  if (!impl.Load("nvmlDeviceGetCurrentClocksEventReasons", impl.throttle)) {
    (void)impl.Load("nvmlDeviceGetCurrentClocksThrottleReasons", impl.throttle);
  }
  (void)impl.Load("nvmlDeviceGetTotalEccErrors", impl.ecc);
  (void)impl.Load("nvmlSystemGetDriverVersion", impl.driver_version);
  impl.started = complete && impl.init() == kNvmlSuccess;
}

Nvml::~Nvml() {
  if (impl_->started) impl_->shutdown();
  if (impl_->library != nullptr) dlclose(impl_->library);
}

GpuReadings Nvml::Read(int gpu, const std::string& pci_bus_id) const {
  GpuReadings readings;
  if (!impl_->started) return readings;
  const NvmlDevice device = impl_->Device(gpu, pci_bus_id);
  if (device == nullptr) return readings;
  NvmlUtilization utilization{};
  if (impl_->utilization(device, &utilization) == kNvmlSuccess) {
    readings.utilization_ratio = utilization.gpu / 100.0;
  }
  unsigned int milliwatts = 0;
  if (impl_->power(device, &milliwatts) == kNvmlSuccess) readings.power_watts = milliwatts / 1e3;
  unsigned int megahertz = 0;
  if (impl_->clock(device, kNvmlClockSm, &megahertz) == kNvmlSuccess) {
    readings.sm_clock_hertz = megahertz * 1e6;
  }
  NvmlMemory memory{};
  if (impl_->memory(device, &memory) == kNvmlSuccess) {
    readings.is_read = true;
    readings.memory_used_bytes = static_cast<double>(memory.used);
    readings.memory_free_bytes = static_cast<double>(memory.free);
  }
  readings.throttle = impl_->Throttle(device);
  readings.ecc_corrected = impl_->EccErrors(device, kNvmlEccCorrected);
  readings.ecc_uncorrected = impl_->EccErrors(device, kNvmlEccUncorrected);
  return readings;
}

std::string Nvml::DriverVersion() const {
  std::array<char, kNvmlVersionBytes> version{};
  const bool is_read = impl_->started && impl_->driver_version != nullptr &&
                       impl_->driver_version(version.data(), kNvmlVersionBytes) == kNvmlSuccess;
  return is_read ? version.data() : "";
}

}  // namespace logprobd
