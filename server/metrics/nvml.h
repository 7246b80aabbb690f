#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace logprobd {

/// The reasons that lower a GPU's clocks now.
struct GpuThrottle {
  bool power_cap = false;    ///< The power limit; usual under full load.
  bool thermal = false;      ///< The temperature, limited by the driver or the hardware.
  bool power_brake = false;  ///< The machine's power supply.
  bool hw_slowdown = false;  ///< The hardware halves the clocks, for heat or for power.
};

/// The driver's current readings of a GPU.
struct GpuReadings {
  bool is_read = false;          ///< The driver answered; otherwise all other members are 0.
  double utilization_ratio = 0;  ///< 0 to 1, over the driver's last sample period.
  double power_watts = 0;
  double sm_clock_hertz = 0;
  double memory_used_bytes = 0;  ///< Used by all processes, including this one.
  double memory_free_bytes = 0;
  GpuThrottle throttle;
  /// ECC errors since the driver was loaded.
  uint64_t ecc_corrected = 0;
  uint64_t ecc_uncorrected = 0;
};

/// NVIDIA's management library (NVML), loaded at run time. Without a driver there are no readings.
/// Thread-safe.
class Nvml {
 public:
  /// Loads the library. If that fails, Read returns zeros.
  Nvml();
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// Reads CUDA device `gpu`; a reading that the driver does not provide is 0. Takes some
  /// milliseconds, or longer if a GPU no longer answers. `pci_bus_id`: the bus ID of the device,
  /// such as "0000:3b:00.0", which is more reliable than its ordinal; empty: unknown.
  GpuReadings Read(int gpu, const std::string& pci_bus_id) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
