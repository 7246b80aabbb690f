#include "tests/bench/energy_meter.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <chrono>
#include <stop_token>
#include <thread>

namespace logprobd::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPollInterval = std::chrono::milliseconds(2);
constexpr std::chrono::duration<double> kSpanMin{0.25};

// These are the declarations of nvml.h that are used. Its ABI is stable.
using NvmlDevice = struct NvmlDeviceOpaque*;
constexpr int kNvmlSuccess = 0;

/// A value of the counter and the time at which it was first read.
struct Reading {
  unsigned long long millijoules = 0;
  Clock::time_point time;
};

}  // namespace

struct EnergyMeter::Impl {
  void* library = nullptr;
  bool is_started = false;
  NvmlDevice device = nullptr;  ///< Null if there is no counter.
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*by_bus_id)(const char*, NvmlDevice*) = nullptr;
  int (*energy)(NvmlDevice, unsigned long long*) = nullptr;
  // Only the thread uses these two until it has been joined.
  std::optional<Reading> first;
  std::optional<Reading> last;
  std::jthread thread;

  template <typename Function>
  bool Load(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }

  std::optional<unsigned long long> Read() const {
    unsigned long long millijoules = 0;
    if (energy(device, &millijoules) != kNvmlSuccess) return std::nullopt;
    return millijoules;
  }

  void Poll(const std::stop_token& stop) {
    std::optional<unsigned long long> previous = Read();
    while (!stop.stop_requested()) {
      std::this_thread::sleep_for(kPollInterval);
      const std::optional<unsigned long long> current = Read();
      if (!current.has_value() || current == previous) continue;
      previous = current;
      last = Reading{*current, Clock::now()};
      if (!first.has_value()) first = last;
    }
  }
};

EnergyMeter::EnergyMeter() : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (impl.library == nullptr) return;
  const bool is_complete = impl.Load("nvmlInit_v2", impl.init) &&
                           impl.Load("nvmlShutdown", impl.shutdown) &&
                           impl.Load("nvmlDeviceGetHandleByPciBusId_v2", impl.by_bus_id) &&
                           impl.Load("nvmlDeviceGetTotalEnergyConsumption", impl.energy);
  impl.is_started = is_complete && impl.init() == kNvmlSuccess;
  int gpu = 0;
  char bus_id[32] = "";
  if (!impl.is_started || cudaGetDevice(&gpu) != cudaSuccess ||
      cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), gpu) != cudaSuccess ||
      impl.by_bus_id(bus_id, &impl.device) != kNvmlSuccess || !impl.Read().has_value()) {
    impl.device = nullptr;
  }
}

EnergyMeter::~EnergyMeter() {
  impl_->thread = {};
  if (impl_->is_started) impl_->shutdown();
  if (impl_->library != nullptr) dlclose(impl_->library);
}

void EnergyMeter::Start() {
  if (impl_->device == nullptr) return;
  impl_->thread = {};  // of a measurement that was given up
  impl_->first.reset();
  impl_->last.reset();
  impl_->thread = std::jthread([this](const std::stop_token& stop) { impl_->Poll(stop); });
}

std::optional<double> EnergyMeter::Stop() {
  impl_->thread = {};
  if (!impl_->first.has_value()) return std::nullopt;
  const std::chrono::duration<double> span = impl_->last->time - impl_->first->time;
  if (span < kSpanMin) return std::nullopt;
  return static_cast<double>(impl_->last->millijoules - impl_->first->millijoules) / 1e3 /
         span.count();
}

}  // namespace logprobd::testing
