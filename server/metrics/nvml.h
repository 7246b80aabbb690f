#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace logprobd {

/// The reasons for which a GPU's clocks are currently lowered.
struct GpuThrottle {
  bool power_cap = false;    ///< The power limit, a usual reason under full load.
  bool thermal = false;      ///< The temperature limit of the driver or the hardware.
  bool power_brake = false;  ///< The machine's power supply.
  bool hw_slowdown = false;  ///< The hardware halves the clocks because of heat or power.
};

/// The driver's current readings of a GPU.
struct GpuReadings {
  /// True if the driver reported memory. Values that it does not report are 0.
  bool is_read = false;
  double utilization_ratio = 0;  ///< From 0 to 1, over the driver's last sample period.
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

  /// Reads CUDA device `gpu`. A reading that the driver does not provide is 0. Takes some
  /// milliseconds, or longer if a GPU no longer answers. `pci_bus_id` is the bus ID of the device,
  /// such as "0000:3b:00.0", or an empty string if it is unknown. It identifies the device more
  /// reliably than the ordinal.
  GpuReadings Read(int gpu, const std::string& pci_bus_id) const;

  /// Returns the version of the driver, such as "580.159.04", or an empty string if it is unknown.
  std::string DriverVersion() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace logprobd
